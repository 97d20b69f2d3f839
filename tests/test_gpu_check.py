"`tools/gpu_check.sh`: what fails is told at its end; packages come from wheels; all of it runs on a simulated GPU"
import json, os, subprocess, sys
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

@pytest.mark.long
def test_rehearsal(tmp_path):
    res = check(tmp_path, '--rehearse', timeout=600)
    assert res.returncode==0 and res.stdout.splitlines()[-1]=='nothing failed', res.stdout
    assert 'skipped="0"' in (tmp_path/'tests.xml').read_text()
    figures = json.loads((tmp_path/'gpu-rehearsal.json').read_text())
    assert len(figures['sections'])==6 and figures['failed']=={} and '| a vote, sockets |' in (tmp_path/'tables.md').read_text()
