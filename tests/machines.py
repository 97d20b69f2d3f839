"""Two machines on this one: network namespaces with host names of their own, and a link between them that can be cut.

Needs root and `ip` (iproute2): see `usable`."""
import os,subprocess,tempfile
from contextlib import ExitStack,contextmanager
from functools import cache
from pathlib import Path

hosts = 'machine-a','machine-b'
_address = '10.77.0.{}'

def _ip(*args): subprocess.run(['ip', *args], check=True, capture_output=True)

@cache
def usable()->bool:
    "Whether this process may make network namespaces"
    if os.geteuid(): return False
    try: return subprocess.run(['unshare','-n','-u','-m','ip','link'], capture_output=True).returncode==0
    except OSError: return False

# What /etc/hosts of machine i says: all machines; none; itself as 127.0.1.1, as Debian's installer writes it
names = dict(all=lambda i: ''.join(f'{_address.format(j+1)} {o}\n' for j,o in enumerate(hosts)), none=lambda i: '',
             debian=lambda i: f'127.0.1.1 {hosts[i]}\n')

@contextmanager
def two_machines(known='all'):
    "Yields (a function that prefixes a command so that it runs on machine 0 or 1, one that cuts the link); `known`: a key of `names`"
    ids = [f'ld{os.getpid()}{o}' for o in 'ab']
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.NamedTemporaryFile('w', suffix='.hosts')) for _ in hosts]
        for i,f in enumerate(files):
            f.write('127.0.0.1 localhost\n' + names[known](i))
            f.flush()
        def on(i, *command): # `ip netns exec` has mounts of its own
            setup = f'mount --bind {files[i].name} /etc/hosts && hostname {hosts[i]} && exec "$@"'
            return ['ip','netns','exec',ids[i],'unshare','-u','sh','-c',setup,'sh',*map(str, command)]
        try:
            for o in ids: _ip('netns', 'add', o)
            _ip('link', 'add', 'link0', 'netns', ids[0], 'type', 'veth', 'peer', 'name', 'link0', 'netns', ids[1])
            for i,o in enumerate(ids):
                _ip('-n', o, 'addr', 'add', f'{_address.format(i+1)}/24', 'dev', 'link0')
                for link in ('lo','link0'): _ip('-n', o, 'link', 'set', link, 'up')
            yield on,lambda: _ip('-n', ids[1], 'link', 'set', 'link0', 'down')
        finally:
            for o in ids:
                if Path(f'/run/netns/{o}').exists(): _ip('netns', 'del', o)
