"""Several machines on this one: network namespaces with host names of their own, joined by a cable that can be cut or slow.

Needs root, `ip` (iproute2) and /dev/net/tun: see `usable`. The cable is a thread that carries Ethernet frames between TAP devices,
so a machine that is cut off gets no word of it: no FIN, no link that is down."""
import ctypes,fcntl,heapq,os,selectors,socket,struct,subprocess,tempfile,threading,time
from contextlib import ExitStack,contextmanager
from functools import cache

hosts = 'machine-a','machine-b','machine-c','machine-d'
_address = '10.77.0.{}'

def _ip(*args): subprocess.run(['ip', *args], check=True, capture_output=True)

@cache
def usable()->bool:
    "Whether this process may make network namespaces, and devices in them"
    if os.geteuid(): return False
    make = ['unshare','-n','-u','-m','ip','tuntap','add','dev','link0','mode','tap']
    try: return subprocess.run(make, capture_output=True).returncode==0
    except OSError: return False

# What /etc/hosts of machine i of n says: all machines; none; itself as 127.0.1.1, as Debian's installer writes it
names = dict(all=lambda i, n: ''.join(f'{_address.format(j+1)} {o}\n' for j,o in enumerate(hosts[:n])), none=lambda i, n: '',
             debian=lambda i, n: f'127.0.1.1 {hosts[i]}\n')

def _enter(space):
    "Let this thread be in a network namespace"
    with open(f'/run/netns/{space}') as f: assert not ctypes.CDLL(None).setns(f.fileno(), 0x40000000) # CLONE_NEWNET

class Cable:
    "Carries frames between machines, while its `with` block lasts"
    def __init__(self, spaces):
        self.delay_s = 0.  # Of each frame
        self.cut = set()   # Machines, by number, that no frame leaves or reaches
        self.spaces = spaces
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._carry, name='cable')
        self.ready = threading.Event()

    def __enter__(self):
        self.thread.start()
        assert self.ready.wait(10), 'no devices'
        return self

    def __exit__(self, *exc):
        self.done.set()
        self.thread.join()

    def _open(self, space):
        "The descriptor of a machine's device; this thread is then in its namespace"
        _enter(space)
        fd = os.open('/dev/net/tun', os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(fd, 0x400454ca, struct.pack('16sH22x', b'link0', 0x1002)) # TUNSETIFF: IFF_TAP, IFF_NO_PI
        return fd

    def _carry(self):
        fds,late,n = [self._open(o) for o in self.spaces],[],0
        self.ready.set()
        with selectors.DefaultSelector() as found:
            for i,fd in enumerate(fds): found.register(fd, selectors.EVENT_READ, i)
            while not self.done.is_set():
                for key,_ in found.select(max(0, late[0][0]-time.monotonic()) if late else .05):
                    frame = os.read(key.fd, 1<<16)
                    if key.data in self.cut: continue
                    n += 1
                    heapq.heappush(late, (time.monotonic()+self.delay_s, n, key.data, frame))
                while late and late[0][0] <= time.monotonic(): self._deliver(fds, *heapq.heappop(late)[2:])
        for fd in fds: os.close(fd)

    def _deliver(self, fds, sender, frame):
        "To the machine that the frame is for: the last byte of its hardware address; to all others if it is for all"
        to = [frame[5]] if not frame[0]&1 else range(len(fds))
        for i in to:
            if i!=sender and i<len(fds) and i not in self.cut: os.write(fds[i], frame)

@contextmanager
def machines(n=2, known='all'):
    "Yields (a function that lets a process of one thread be on machine i, the `Cable`); `known`: a key of `names`"
    ids = [f'ld{os.getpid()}{o}' for o in 'abcd'[:n]]
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.NamedTemporaryFile('w', suffix='.hosts')) for _ in ids]
        for i,f in enumerate(files):
            f.write('127.0.0.1 localhost\n' + names[known](i, n))
            f.flush()
        def enter(i):
            _enter(ids[i])
            assert not ctypes.CDLL(None).unshare(0x4020000) # CLONE_NEWUTS, CLONE_NEWNS
            for o in (['--make-rprivate','/'],['--bind',files[i].name,'/etc/hosts']): subprocess.run(['mount',*o], check=True)
            socket.sethostname(hosts[i])
        for i,o in enumerate(ids):
            _ip('netns', 'add', o)
            stack.callback(_ip, 'netns', 'del', o)
            _ip('-n', o, 'tuntap', 'add', 'dev', 'link0', 'mode', 'tap')
            _ip('-n', o, 'link', 'set', 'link0', 'address', f'02:00:00:00:00:{i:02x}')
            _ip('-n', o, 'addr', 'add', f'{_address.format(i+1)}/24', 'dev', 'link0')
            for link in ('lo','link0'): _ip('-n', o, 'link', 'set', link, 'up')
        with Cable(ids) as cable: yield enter,cable
