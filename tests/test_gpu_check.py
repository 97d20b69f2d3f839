"`tools/gpu_check.sh`: what fails is told at its end; packages come from wheels; all of it runs without a GPU"
import json, os, stat, subprocess, sys, zipfile
from pathlib import Path
import pytest

root = Path(__file__).parent.parent

def check(out, *args, python=sys.executable, timeout=60, **env):
    env = {**os.environ, 'PYTHON': str(python), **env}
    call = 'bash',root/'tools/gpu_check.sh','--out',out,*args
    return subprocess.run(call, env=env, capture_output=True, text=True, timeout=timeout)

def test_failures_stand_at_the_end(tmp_path):
    res = check(tmp_path/'out', python='false')
    assert res.returncode==1 and res.stdout.splitlines()[-2:]==['FAILED: 1', '  machine (status 1)']
    assert check(tmp_path/'out', '--faster').returncode==2

def test_wheels(tmp_path):
    "A package that the machine lacks is there for the checks, and gone afterwards; an interpreter that looks for it, and fails"
    (tmp_path/'wheels').mkdir()
    for name,code in (('lacking_here', 'said = "it is here"'), ('pytest', '1/0')):
        with zipfile.ZipFile(tmp_path/f'wheels/{name}-1.0-py3-none-any.whl', 'w') as z: z.writestr(f'{name}.py', code)
    python = tmp_path/'python'
    python.write_text(f'#!/bin/sh\ncase "$1" in -) ;; *) exit 1;; esac\n[ $# = 3 ] || exec {sys.executable} -c '
                      '"import lacking_here,sys; print(lacking_here.said); sys.exit(1)"\n'
                      f'exec {sys.executable} "$@"\n')
    python.chmod(python.stat().st_mode|stat.S_IXUSR)
    res = check(tmp_path/'out', '--wheels', tmp_path/'wheels', python=python)
    log = (tmp_path/'out/log.txt').read_text()
    assert 'lacking-here: from' in log and 'pytest: the machine has' in log and 'it is here' in log
    assert res.returncode==1 and not (tmp_path/'out/.site').exists()

def test_packages_that_are_elsewhere(tmp_path):
    (tmp_path/'a_peer.py').write_text('said = "a peer"')
    python = tmp_path/'python'
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "import a_peer,learnerdist,sys; print(a_peer.said); sys.exit(1)"\n')
    python.chmod(python.stat().st_mode|stat.S_IXUSR)
    assert 'a peer' in check(tmp_path/'out', python=python, PYTHONPATH=str(tmp_path)).stdout

@pytest.mark.long
def test_rehearsal(tmp_path):
    res = check(tmp_path, '--rehearse', timeout=1500)
    assert res.returncode==0 and res.stdout.splitlines()[-1]=='nothing failed', res.stdout
    figures = json.loads((tmp_path/'gpu-rehearsal.json').read_text())
    assert len(figures['sections'])==6 and figures['failed']=={} and '| a vote, sockets |' in (tmp_path/'tables.md').read_text()
