#!/bin/sh
# Every measurement that needs a GPU, on one NVIDIA GPU, in parts of under ten minutes each:
#
#     bench/gpu.sh OUT [PART ...]
#
# PART: correct kernel iteration small start figures peers; all of them without any. OUT is a folder for raw
# records, tables and pictures. PYTHON names the interpreter that has orca_jax[cuda,bench]; PEERS one that has
# torch and transformers (the part `peers` is left out without it), VLLM one that has vllm. A part that fails or
# takes over ten minutes is said so at the end, and the others go on; the exit status is then 1.

set -u
[ $# -ge 1 ] || { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }
out=$1
shift
mkdir -p "$out" || exit 2
python=${PYTHON:-python3}
cd "$(dirname "$0")/.." || exit 2
case $out in /*) ;; *) out=$OLDPWD/$out ;; esac
failed=

# measure NAME SECONDS MODULE [ARGUMENT ...]: one benchmark, its output under $out, and how it ended.
measure() {
    name=$1 seconds=$2
    shift 2
    echo "== $name: python -m $*"
    timeout -s KILL "$seconds" "$python" -m "$@" >"$out/$name.txt" 2>"$out/$name.err"
    status=$?
    tail -n 1 "$out/$name.txt"
    if [ $status -ne 0 ]; then
        echo "== $name ended with status $status (137: after $seconds s); $name.err ends:"
        tail -n 3 "$out/$name.err"
        failed="$failed $name"
    fi
}

# The kernel against float64 on small shapes, before any figure.
correct() {
    measure correct 300 bench.kernel --quick
}

kernel() {
    measure kernel 580 bench.kernel --json "$out/kernel.json" --picture "$out/kernel.png"
}

iteration() {
    measure iteration-13b 580 bench.iteration --preset gpt3-13b --rows 1,8,32,128 --context 512 --initiation 2047
}

# Where the host is the limit, two stages on one GPU, the choice of tokens, and what --deterministic costs.
small() {
    measure iteration-gpt2 150 bench.iteration --preset gpt2 --rows 1,8,32,128 --context 512
    measure sampler 120 bench.sampler
    measure deterministic 120 bench.deterministic --preset gpt2
    measure stages 180 bench.stages --same-gpu --splits 1x1,2x1,2x1+processes,2x1+after --preset gpt2
}

start() {
    measure start-13b 580 bench.start --model gpt3-13b
}

figures() {
    measure figure-9 150 bench.engine --paper --json "$out/figure-9.json" --picture "$out/figure-9.png"
    measure figure-10 250 bench.end_to_end --requests 16 --seconds 4 --until 8 --honesty 1 \
        --json "$out/figure-10.json" --picture "$out/figure-10.png" --timeline "$out/figure-10.perfetto.json"
    measure figure-11 150 bench.end_to_end --homogeneous 256,64 --requests 16 --seconds 4 --until 8 --honesty 0 \
        --json "$out/figure-11.json" --picture "$out/figure-11.png"
}

peers() {
    if [ -z "${PEERS:-}" ]; then
        echo "== peers: PEERS names no interpreter with torch and transformers; left out"
        return
    fi
    measure peers-gpt2 580 bench.compare --peer transformers="$PEERS" --peer transformers-compiled="$PEERS" \
        --peer transformers-continuous="$PEERS" ${VLLM:+--peer vllm="$VLLM"} --rounds 2 --dtype bfloat16 \
        --arguments 'orca_jax={"memory_fraction": 0.3}' --arguments 'transformers-continuous={"max_memory_percent": 0.2}' \
        ${VLLM:+--arguments 'vllm={"gpu_memory_utilization": 0.2}'} --json "$out/peers-gpt2.json"
}

for part in ${*:-correct kernel iteration small start figures peers}; do
    case $part in
    correct | kernel | iteration | small | start | figures | peers) "$part" ;;
    *) echo "$part is no part; they are correct kernel iteration small start figures peers" >&2; exit 2 ;;
    esac
done
[ -z "$failed" ] || { echo "== failed:$failed"; exit 1; }
