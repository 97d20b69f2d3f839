"Draw docs/batch_size.svg: how many samples a step has, and which learning rate it takes. A square is eight samples, a colour is a process"
from pathlib import Path

page = Path(__file__).parent.parent/'docs/batch_size.svg'
fills,edges = ['#ddf4ff','#fff1e5','#dafbe1','#fbefff'],['#0969da','#bc4c00','#1a7f37','#8250df']
# options; processes; for each part of a step its process and its samples
rows = [('bs=32', 1, [(0,32)]),
        ('bs=32', 4, [(r,32) for r in range(4)]),
        ('global_bs=32', 4, [(r,8) for r in range(4)]),
        ('global_bs=128, max_bs=32', 1, [(0,32)]*4)]

def text(x, y, s, **kw):
    attrs = ''.join(f' {k.replace("_", "-")}="{v}"' for k,v in kw.items())
    return f'<text x="{x}" y="{y}"{attrs}>{s}</text>'

def drawn_row(y, options, n, parts):
    total = sum(n for _,n in parts)
    yield text(16, y, options, font_weight=600, font_family='ui-monospace, monospace')
    yield text(16, y+19, 'one process' if n==1 else f'{n} processes', fill='#59636e')
    x = 226
    for rank,samples in parts:
        for _ in range(samples//8):
            yield f'<rect x="{x}" y="{y-12}" width="11" height="24" rx="3" fill="{fills[rank]}" stroke="{edges[rank]}" stroke-width="1.5"/>'
            x += 14
        x += 8
    yield text(492, y, f'{total} samples a step', font_weight=600)
    yield text(492, y+19, f'the rate for {total}', fill='#59636e')

def drawn()->str:
    height = 66*len(rows)+24
    size = f'viewBox="0 0 664 {height}" width="664"'
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="system-ui, sans-serif" font-size="14" fill="#1f2328">',
            '<title>Batch size and learning rate</title>',
            f'<rect x=".5" y=".5" width="663" height="{height-1}" rx="10" fill="#f6f8fa" stroke="#d1d9e0"/>']
    body = [o for i,row in enumerate(rows) for o in drawn_row(42+66*i, *row)]
    return '\n'.join([*head,*body,'</svg>',''])

if __name__=='__main__': page.write_text(drawn())
