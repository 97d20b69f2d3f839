"""Run the recipes for Slurm on a real Slurm of one machine, in a sandbox:

    apt-get install slurm-wlm munge      # as root
    python tools/slurm.py [--only requeue] [--keep]

It starts munged, slurmctld and slurmd with their files in a temporary folder and ports of their own, submits each recipe as a batch job,
and checks what came of it: the job's state, its output, and that the fit is where it should be. Needs root. No part of the tests."""
import argparse,getpass,os,re,shutil,socket,subprocess,sys,tempfile,time
from contextlib import ExitStack,contextmanager
from pathlib import Path

root = Path(__file__).parent.parent
launch = f'{sys.executable} -m learnerdist.launch'

train = '''
import os,sys,time,torch
from learnerdist.all import *
how,path = sys.argv[1:]
class Slow(Callback):
    order = 950
    def after_batch(self):
        if self.training: time.sleep(.25)
        if rank_distrib()==0: open(f'{path}/at', 'w').write(str(self.train_iter))
        if how=='fail' and self.train_iter==5 and rank_distrib()==1: raise ValueError('a bad batch')
torch.manual_seed(1)
dls = DataLoaders.from_dsets([(torch.ones(1)*i/400,torch.ones(1)) for i in range(400)], bs=4)
learn = Learner(dls, torch.nn.Linear(1,1), torch.nn.MSELoss(), lr=.01, path=path)
cbs = [Checkpoint('ckpt', signals=('SIGTERM','SIGUSR1')), *([] if how=='quick' else [Slow()])]
with learn.distrib_ctx(): learn.fit(60 if how=='long' else 1, cbs=cbs, resume=True)
if rank_distrib()==0: open(f'{path}/done', 'w').write(f'{len(learn.recorder.losses)} {num_distrib()}')
'''

conf = '''
ClusterName=sandbox
SlurmctldHost={host}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={d}/munge.socket
SlurmctldPort={ctld}
SlurmdPort={slurmd}
StateSaveLocation={d}/state
SlurmdSpoolDir={d}/spool
SlurmctldPidFile={d}/slurmctld.pid
SlurmdPidFile={d}/slurmd.pid
SlurmctldLogFile={d}/slurmctld.log
SlurmdLogFile={d}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
KillWait=20
MinJobAge=600
SchedulerParameters=sched_interval=2
JobRequeue=1
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=4000 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
'''

def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]

@contextmanager
def daemon(*command, log):
    with open(log, 'w') as f: p = subprocess.Popen(command, stdout=f, stderr=f)
    try: yield p
    finally:
        p.terminate()
        try: p.wait(20)
        except subprocess.TimeoutExpired: p.kill()

@contextmanager
def slurm(d):
    "A Slurm of this machine, whose environment variables are set within the body"
    host = socket.gethostname().split('.')[0]
    (d/'slurm.conf').write_text(conf.format(d=d, host=host, ctld=free_port(), slurmd=free_port()))
    for o in ('state','spool'): (d/o).mkdir()
    (d/'munge.key').write_bytes(os.urandom(128))
    (d/'munge.key').chmod(0o400)
    os.environ |= dict(SLURM_CONF=str(d/'slurm.conf'), PYTHONPATH=str(root), OMP_NUM_THREADS='1')
    files = [f'--{k}={d}/munge.{v}' for k,v in {'socket': 'socket', 'pid-file': 'pid', 'log-file': 'log', 'seed-file': 'seed'}.items()]
    with ExitStack() as stack:
        def start(*args, log): return stack.enter_context(daemon(*args, log=d/log))
        start('munged','--foreground','--force',f'--key-file={d}/munge.key',*files, log='munged.out')
        wait_for(lambda: (d/'munge.socket').exists(), 20, 'munged')
        start('slurmctld','-D','-c', log='slurmctld.out')
        start('slurmd','-D','-N',host, log='slurmd.out')
        wait_for(lambda: 'idle' in messages('sinfo','-h','-o','%T'), 60, 'slurmd')
        yield

def messages(*command):
    res = subprocess.run(command, capture_output=True, text=True)
    return res.stdout+res.stderr

def wait_for(done, seconds, what):
    end = time.monotonic()+seconds
    while not (res := done()):
        if time.monotonic()>end: raise TimeoutError(f'{what}: not in {seconds} s')
        time.sleep(.2)
    return res

def state(job): return re.search(r'JobState=(\w+)', messages('scontrol','show','job',job))[1]
def ended(job): return state(job) if state(job) not in ('PENDING','RUNNING','COMPLETING','REQUEUED','CONFIGURING') else None

class Job:
    "A batch job of a recipe, in a folder of its own"
    def __init__(self, d, name, script, *options):
        self.path = d/name
        self.path.mkdir()
        (self.path/'train.py').write_text(train)
        (self.path/'job.sh').write_text('#!/bin/bash\n'+script.format(launch=launch, d=self.path))
        out = messages('sbatch','-J',name,'-o',str(self.path/'out'),'--open-mode=append',*options,str(self.path/'job.sh'))
        self.id = re.search(r'batch job (\d+)', out)[1]
    def end(self, seconds=180): return wait_for(lambda: ended(self.id), seconds, f'{self.path.name}: {state(self.id)}')
    def text(self, name='out'): return (self.path/name).read_text() if (self.path/name).exists() else ''
    def started(self): wait_for(lambda: int(self.text('at') or 0)>=4, 120, f'{self.path.name} trains')

def by_node(d):
    "One task, which starts the ranks"
    job = Job(d, 'by_node', 'srun -n1 {launch} --nproc 2 {d}/train.py quick {d}', '-n1','-c2')
    return job.end()=='COMPLETED' and job.text('done')=='50 2',job

def by_task(d):
    "Each task is a rank"
    job = Job(d, 'by_task', 'srun -n2 {launch} {d}/train.py quick {d}', '-n2')
    return job.end()=='COMPLETED' and job.text('done')=='50 2',job

def failing(d):
    "A rank fails: the job does, and its output names the rank"
    job = Job(d, 'failing', 'srun -n1 {launch} --nproc 2 {d}/train.py fail {d}', '-n1','-c2')
    return job.end()=='FAILED' and 'rank 1 failed first: ValueError: a bad batch' in job.text(),job

def failing_task(d):
    job = Job(d, 'failing_task', 'srun -n2 {launch} {d}/train.py fail {d}', '-n2')
    return job.end()=='FAILED' and 'rank 1 failed: ValueError: a bad batch' in job.text() and 'rank 0 failed' not in job.text(),job

requeued = '''srun {launch} {d}/train.py long {d}
status=$?
[ $status = 75 ] && scontrol requeue $SLURM_JOB_ID
exit $status
'''

def after_signal(d, name, script, *options):
    "USR1 before the time limit, sent by hand to be quick: all save, end with status 75, and go on when the job is started again"
    job = Job(d, name, script, '--requeue','--signal=USR1@30','-t','10',*options)
    job.started()
    messages('scancel','--signal=USR1',job.id)
    wait_for(lambda: 'goes on from there' in job.text() or 'Restarts=1' in messages('scontrol','show','job',job.id), 60, 'requeued')
    messages('scontrol','release',job.id)
    wait_for(lambda: 'going on in epoch' in job.text(), 240, f'{name} goes on') # Slurm waits a while before it starts a job again
    messages('scancel',job.id)
    return not re.search(r'failed|Traceback|hostname of the client', job.text()),job

def requeue(d): return after_signal(d, 'requeue', requeued, '-n2')

def requeue_by_node(d):
    script = requeued.replace('{launch}', '-n1 {launch} --signals-to-handle SIGTERM,SIGINT,SIGUSR1 --nproc 2')
    return after_signal(d, 'requeue_by_node', script, '-n1','-c2')

def time_limit(d):
    "Slurm's own signal, a minute or two before a limit of three"
    job = Job(d, 'time_limit', requeued, '--requeue','--signal=USR1@60','-t','3','-n2')
    wait_for(lambda: 'going on in epoch' in job.text(), 480, 'time_limit goes on')
    messages('scancel',job.id)
    return not re.search(r'failed|Traceback', job.text()),job

def scancel(d):
    "SIGTERM: all save, and nothing is called a failure"
    job = Job(d, 'scancel', 'srun -n1 {launch} --nproc 2 {d}/train.py long {d}', '-n1','-c2')
    job.started()
    messages('scancel',job.id)
    good = job.end()=='CANCELLED' and wait_for(lambda: [*(job.path/'ckpt').glob('epoch_*')], 60, 'a checkpoint')
    return bool(good) and not re.search(r'failed|Traceback', job.text()),job

recipes = by_node,by_task,failing,failing_task,scancel,requeue,requeue_by_node,time_limit

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--only', default='', help='recipes whose name contains this')
    p.add_argument('--keep', action='store_true', help='keep the folder')
    args = p.parse_args()
    if getpass.getuser()!='root' or not all(map(shutil.which, ('munged','slurmctld','slurmd'))): sys.exit(__doc__)
    d,bad = Path(tempfile.mkdtemp(prefix='slurm-')),[]
    try:
        with slurm(d):
            for f in recipes:
                if args.only not in f.__name__: continue
                start = time.monotonic()
                try: good,job = f(d)
                except TimeoutError as e: good,job,out = False,None,str(e)
                else: out = job.text()
                print(f'{f.__name__}: {"as it should" if good else "WRONG"}, {time.monotonic()-start:.0f} s', flush=True)
                if not good: print(out)
                bad += [] if good else [f.__name__]
    finally:
        if args.keep: print(d)
        else: shutil.rmtree(d, ignore_errors=True)
    sys.exit(bool(bad))

if __name__=='__main__': main()
