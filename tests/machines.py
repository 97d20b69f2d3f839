"""Two machines on this one: network namespaces with host names of their own, and a link between them that can be cut.

Needs root and `ip` (iproute2): see `usable`."""
import os,subprocess,tempfile
from contextlib import contextmanager
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

@contextmanager
def two_machines():
    "Yields (a function that prefixes a command so that it runs on machine 0 or 1, a function that cuts the link)"
    ids = [f'ld{os.getpid()}{o}' for o in 'ab']
    with tempfile.NamedTemporaryFile('w', suffix='.hosts') as names:
        names.write('127.0.0.1 localhost\n' + ''.join(f'{_address.format(i+1)} {o}\n' for i,o in enumerate(hosts)))
        names.flush()
        def on(i, *command): # `ip netns exec` has mounts of its own
            setup = f'mount --bind {names.name} /etc/hosts && hostname {hosts[i]} && exec "$@"'
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
