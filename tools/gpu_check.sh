#!/usr/bin/env bash
# All that one GPU can show, in at most 25 minutes: tests/test_cuda.py, tests of learn.compile there, benchmarks/gpu.py.
#
#     tools/gpu_check.sh [--rehearse] [--only PHASE] [--wheels DIR] [--out DIR]
#
# --rehearse   the same from end to end with tiny sizes, on a simulated GPU (tests/simulated_gpu.py) where there is none: its figures mean nothing.
#              Nothing is compiled: models run eagerly, and the tests of learn.compile, which CI runs itself, are collected only
# --only PHASE tests, compiling or benchmark: one of the three, for a machine that is lent for minutes
# --wheels DIR packages from wheels in DIR, for a machine without a registry: fastcore, fastprogress, pytest, and the peers that are to be measured.
#              They are unpacked into a folder of their own; torch is the machine's
# --out DIR    where log, JSON, tables and plots go; by default $OUT, or gpu_check/
# $PYTHON is the interpreter, by default python3. The last lines say what failed; the status is then 1. A phase that takes too long is ended, and failed.
# To fetch the wheels: pip download --only-binary :all: --no-deps -d DIR fastcore fastprogress pytest iniconfig pluggy fastai accelerate lightning-fabric …
set -uo pipefail
exec </dev/null
rehearse= only= wheels= out=${OUT:-gpu_check}
while (($#)); do
    case $1 in
        --rehearse) rehearse=1; shift ;;
        --only) only=${2:?--only needs tests, compiling or benchmark}; shift 2 ;;
        --wheels) wheels=${2:?--wheels needs a folder}; shift 2 ;;
        --out) out=${2:?--out needs a folder}; shift 2 ;;
        *) sed -n '2,/^set/{/^#/p}' "$0" | cut -c3-; exit 2 ;;
    esac
done
case $only in ''|tests|compiling|benchmark) ;; *) echo "--only $only: give tests, compiling or benchmark"; exit 2 ;; esac
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
[[ -z $wheels ]] || wheels=$(cd "$wheels" && pwd) || exit 2
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
py=${PYTHON:-python3} log=$out/log.txt failed=() begin=$SECONDS
: >"$log"
there=${PYTHONPATH:+:$PYTHONPATH} # peers that are elsewhere
export PYTHONPATH=$PWD$there PYTHONDONTWRITEBYTECODE=1 GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}" BENCH_SECONDS="${BENCH_SECONDS:-25}"
[[ -z $rehearse ]] || export REHEARSE=1

say() { echo "$@" | tee -a "$log"; }

wanted() { [[ -z $only || $only == "$1" ]]; }

phase() { # phase TITLE SECONDS COMMAND…: its output goes to the log; a failure is noted, and what comes after it runs all the same
    local title=$1 limit=$2 start=$SECONDS status; shift 2
    say "== $title"
    timeout -k 20 "$limit" "$@" >>"$log" 2>&1; status=$?
    if ((status)); then
        failed+=("$title (status $status$( ((status==124)) && echo ": longer than $limit s"))")
        tail -n 15 "$log"
    fi
    say "== $title: $( ((status)) && echo FAILED || echo done), $((SECONDS-start)) s"
}

unpack() { # the packages that the wheels hold, without what the machine has
    local site=$out/.site
    "$py" - "$wheels" "$site" <<'P'
import sys,zipfile
from importlib.metadata import PackageNotFoundError,version
from pathlib import Path
for w in sorted(Path(sys.argv[1]).glob('*.whl')):
    name = w.name.split('-')[0].replace('_', '-')
    try: print(f'{name}: the machine has {version(name)}')
    except PackageNotFoundError:
        zipfile.ZipFile(w).extractall(sys.argv[2])
        print(f'{name}: from {w.name}')
P
}

where() {
    "$py" - <<'P'
import os,platform,sys,torch
gpu = torch.cuda.is_available()
print('torch',torch.__version__,'Python',sys.version.split()[0],platform.machine(),os.cpu_count(),'cores',f'load {os.getloadavg()[0]:.1f}')
print('GPU:',torch.cuda.get_device_name() if gpu else 'simulated','nccl',torch.cuda.nccl.version() if gpu else None)
import learnerdist.all,learnerdist
print('learnerdist from',learnerdist.__file__)
if not gpu and not os.environ.get('REHEARSE'): sys.exit('no GPU here: --rehearse runs on a simulated one')
P
}

export -f unpack where
export py wheels out
[[ -z $wheels ]] || { phase 'packages from wheels' 120 bash -c unpack; export PYTHONPATH=$PWD:$out/.site$there; }
phase 'machine' 120 bash -c where
grep -E '^(torch|GPU|learnerdist) ?' "$log"
if ((${#failed[@]}==0)); then
    wanted tests && phase 'tests on the GPU' 480 "$py" -m pytest tests/test_cuda.py -m '' -p no:cacheprovider --junitxml "$out/tests.xml" -rs
    wanted compiling && phase 'tests of learn.compile' 300 "$py" -m pytest ${rehearse:+--collect-only -q} tests/test_compiling.py -p no:cacheprovider --show-capture=no \
        --junitxml "$out/compiling.xml"
    wanted benchmark && phase 'benchmarks/gpu.py' $((begin+1500-SECONDS)) "$py" benchmarks/gpu.py --out "$out"
    grep -E '^\| |^\*\*|^- ' "$log" >"$out/tables.md"
    grep -E '^[0-9]+ (passed|skipped|failed)|passed|skipped in' "$log" | tail -n 2
fi
rm -rf "$out/.site"
say "== all: $((SECONDS-begin)) s; log, JSON, tables and plots in $out"
if ((${#failed[@]})); then
    say "FAILED: ${#failed[@]}"
    for o in "${failed[@]}"; do say "  $o"; done
    exit 1
fi
say 'nothing failed'
