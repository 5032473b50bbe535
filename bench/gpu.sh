#!/bin/sh
# Every measurement that needs a GPU, on one NVIDIA GPU, in parts that take under ten minutes each:
#
#     bench/gpu.sh OUT [PART ...]           the parts in this order; all of them without any
#     bench/gpu.sh --cpu OUT [PART ...]     the same at small sizes where there is no GPU, to try it out
#     bench/gpu.sh [--cpu] --list           what each part runs, and its limits in seconds
#
#     correct         versions; the kernel in every form against float64; memcheck on one, where the tool is
#     experts         products of experts: against float64, memcheck, then over their floor; a small mixture
#     latent          latent attention's kernel: against float64, memcheck, then over its floor
#     tokens          the whole engine's choices against model/reference.py
#     increments      the kernel: the increment phase; other head sizes and blocks
#     initiations     the kernel: the initiation phase, mixed batches; what a call launches
#     beside          cuDNN, attention_mgpu and other kernels of JAX, PyTorch
#     iteration       GPT-2 over its floor: as it is, without CUDA graphs, without Triton's products
#     updates         the same with CUDA graphs that are updated less often
#     big             GPT-3 13B over its floor; big_no_graphs, big_no_triton, big_skip_temp: without these
#     small           the choice of tokens, --deterministic, two stages on one GPU
#     start           how long until the engine is ready, GPT-2 and 13B
#     figures         the paper's Figures 9 to 11
#     peers           GPT-2 beside other engines
#
# What is measured is printed at once. OUT is a folder for it all: NAME.txt and NAME.err of each, raw records,
# pictures. A measurement that fails or takes too long is said at the end, and the others go on; the exit status
# is then 1. PYTHON names the interpreter (python3). It needs Linux, and of packages no more than
#
#     python3 -m venv gpu && gpu/bin/pip install 'jax[cuda13]' flax rich        (--cpu: jax)
#     PYTHON=gpu/bin/python bench/gpu.sh OUT
#
# for this checkout is found from where it lies. Matplotlib draws pictures where it is installed; PyTorch stands
# beside the kernel where it is; stages in processes of their own are measured where gRPC is. PEERS names an
# interpreter that has torch and transformers (without it the part `peers` is left out), VLLM one that has vllm.

set -u
cpu= list=
while :; do
    case ${1:-} in
    --cpu) cpu=yes; shift ;;
    --list) list=yes; shift ;;
    *) break ;;
    esac
done
if [ -z "$list" ]; then
    [ $# -ge 1 ] || { sed -n '2,31p' "$0" | sed 's/^# \{0,1\}//' >&2; exit 2; }
    mkdir -p "$1" || exit 2
    out=$(cd "$1" && pwd) || exit 2
    shift
else
    out=OUT
fi
python=${PYTHON:-python3}
case $python in */*) python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python") ;; esac
cd "$(dirname "$0")/.." || exit 2
[ -z "$cpu" ] || export JAX_PLATFORMS=cpu
export PYTHONUNBUFFERED=1
failed=
under=  # words before the interpreter: variables, tools

# measure NAME SECONDS MODULE [ARGUMENT ...]: one benchmark, printed as it goes and kept under $out.
measure() {
    name=$1 seconds=$2
    shift 2
    if [ -n "$list" ]; then
        echo "$part $name $seconds $*"
        return
    fi
    echo "== $name: $under python -m $*"
    {
        # shellcheck disable=SC2086
        $under timeout -k 10 "$seconds" "$python" -m "$@" 2>"$out/$name.err" </dev/null
        echo $? >"$out/$name.status"
    } | tee "$out/$name.txt"
    status=$(cat "$out/$name.status")
    rm -f "$out/$name.status"
    if [ "$status" -ne 0 ]; then
        echo "== $name ended with status $status (124 or 137: after $seconds s); $name.err ends:"
        tail -n 5 "$out/$name.err"
        failed="$failed $name"
    fi
}

# memory_checked NAME SECONDS MODULE [ARGUMENT ...]: the same under compute-sanitizer, where there is one.
memory_checked() {
    PATH=$PATH:/usr/local/cuda/bin
    if [ -n "$list" ] || command -v compute-sanitizer >/dev/null; then
        under="env XLA_PYTHON_CLIENT_ALLOCATOR=platform compute-sanitizer --tool memcheck --error-exitcode 9"
        measure "$@"
        under=
    else
        echo "== $1: there is no compute-sanitizer here; left out"
    fi
}

# Whether a module can be imported; always while parts are listed.
has() {
    [ -n "$list" ] || "$python" -c "import $1" >/dev/null 2>&1
}

# picture FILE: the argument that draws it, where matplotlib is.
picture() {
    if has matplotlib; then echo "--picture $out/$1"; fi
}

# tiny NAME SECTIONS: of the kernel benchmark, on a CPU; the interpreter has a thread for each warp group.
tiny() {
    under="env PJRT_NPROC=16"
    measure "$1" 300 bench.kernel --tiny --only "$2"
    under=
}

correct() {
    measure versions 60 bench.versions
    if [ -n "$cpu" ]; then
        tiny correct correctness
        return
    fi
    measure correct 340 bench.kernel --only correctness --seconds 300 --json "$out/correct.json"
    memory_checked memcheck 180 bench.kernel.one_form
}

experts() {
    if [ -n "$cpu" ]; then
        under="env PJRT_NPROC=16"
        measure experts 200 bench.kernel.experts --tiny --repeat 2
        under=
        return
    fi
    measure experts 280 bench.kernel.experts --json "$out/experts.json"
    memory_checked experts-memcheck 120 bench.kernel.experts --one
    measure experts-iteration 180 bench.iteration --preset small-mixture --rows 1,8,32 --context 512 --prefill 1023
}

latent() {
    if [ -n "$cpu" ]; then
        under="env PJRT_NPROC=16"
        measure latent 200 bench.kernel.latent --tiny --repeat 2
        under=
        return
    fi
    measure latent 280 bench.kernel.latent --json "$out/latent.json"
    memory_checked latent-memcheck 120 bench.kernel.latent --one
}

tokens() {
    if [ -n "$cpu" ]; then
        measure tokens 300 bench.tokens --models demo,gpt2 --buckets 8,512 --output 3
        return
    fi
    measure tokens 380 bench.tokens --buckets 1,8,32,512
    measure tokens-float32 200 bench.tokens --models demo,gpt2 --dtype float32
}

increments() {
    if [ -n "$cpu" ]; then
        tiny increments increments
        return
    fi
    measure increments 310 bench.kernel --only increments --seconds 270 --json "$out/increments.json" \
        $(picture increments.png)
    measure sizes 270 bench.kernel --only sizes --seconds 230 --json "$out/sizes.json"
}

initiations() {
    if [ -n "$cpu" ]; then
        tiny initiations initiation
        return
    fi
    measure initiations 410 bench.kernel --only initiation,mixed --seconds 370 --json "$out/initiations.json" \
        $(picture initiations.png)
    measure launches 170 bench.kernel --only launches --seconds 130 --json "$out/launches.json"
}

beside() {
    if [ -n "$cpu" ]; then
        tiny beside peers,torch
        return
    fi
    measure beside 580 bench.kernel --only peers,torch --seconds 530 --json "$out/beside.json" \
        $(picture beside.png)
}

# over_floor NAME SECONDS PRESET PREFILL [XLA_FLAG]
over_floor() {
    [ $# -lt 5 ] || under="env XLA_FLAGS=${XLA_FLAGS:+$XLA_FLAGS }$5"
    if [ -n "$cpu" ]; then
        measure "$1" 200 bench.iteration --preset demo --rows 1,4 --context 64 --prefill 100 --repeat 6
    else
        measure "$1" "$2" bench.iteration --preset "$3" --rows 1,8,32 --context 512 --prefill "$4"
    fi
    under=
}
no_graphs=--xla_gpu_enable_command_buffer= no_triton=--xla_gpu_enable_triton_gemm=false
# By default XLA updates every node of a graph in each iteration. These skip nodes whose arrays stay where they
# are, and map some to stable addresses: temporaries, or arrays that a profile of addresses chooses. jax 0.10 lacks the flag, and XLA ends a process with a flag that it lacks.
skip_temp=--xla_gpu_command_buffer_update_mode=SKIP_TEMP
skip_profiled=--xla_gpu_command_buffer_update_mode=SKIP_PROFILED

iteration() {
    over_floor iteration-gpt2 190 gpt2 1023
    over_floor iteration-gpt2-no-graphs 190 gpt2 1023 $no_graphs
    over_floor iteration-gpt2-no-triton 190 gpt2 1023 $no_triton
}

# Whether XLA can keep nodes of a graph; always while parts are listed.
can_skip() {
    [ -n "$list" ] && return
    XLA_FLAGS=$skip_temp JAX_PLATFORMS=cpu "$python" -c "import jax; jax.devices()" >/dev/null 2>&1 && return
    echo "== $part: this XLA has no $skip_temp; left out"
    return 1
}

updates() {
    can_skip || return
    over_floor iteration-gpt2-skip-temp 190 gpt2 1023 $skip_temp
    over_floor iteration-gpt2-skip-profiled 190 gpt2 1023 $skip_profiled
}

big() {
    over_floor iteration-13b 580 gpt3-13b 2047
}

big_no_graphs() {
    over_floor iteration-13b-no-graphs 580 gpt3-13b 2047 $no_graphs
}

big_no_triton() {
    over_floor iteration-13b-no-triton 580 gpt3-13b 2047 $no_triton
}

big_skip_temp() {
    can_skip || return
    over_floor iteration-13b-skip-temp 580 gpt3-13b 2047 $skip_temp
}

small() {
    splits=1x1,2x1
    if has bench.device.stages_in_processes; then
        splits=$splits,2x1+processes,2x1+after
    else
        echo "== stages: stages in processes of their own need gRPC, which is not here; left out"
    fi
    if [ -n "$cpu" ]; then
        measure sampler 200 bench.sampler --rows 1,4 --vocab 2048 --repeat 3
        measure deterministic 200 bench.deterministic --preset demo --requests 8 --runs 1
        measure stages 300 bench.stages --splits "$splits" --preset demo --rows 1,4 --repeat 6
        return
    fi
    measure sampler 110 bench.sampler
    measure deterministic 220 bench.deterministic --preset gpt2
    measure stages 250 bench.stages --same-gpu --splits "$splits" --preset gpt2 --timeout 200
}

start() {
    if [ -n "$cpu" ]; then
        measure start 400 bench.start --engine --model demo
        return
    fi
    measure start-gpt2 140 bench.start --engine --model gpt2
    measure start-13b 440 bench.start --engine --model gpt3-13b
}

figures() {
    if [ -n "$cpu" ]; then
        measure figure-9 200 bench.paper.engine --preset demo --inputs 8 --output 4 --batches 1,2 --repeat 1 \
            --json "$out/figure-9.json" $(picture figure-9.png)
        measure figure-10 300 bench.paper.end_to_end --preset demo --requests 4 --seconds 0.2 --until 4 --honesty 1 \
            --json "$out/figure-10.json" $(picture figure-10.png) --timeline "$out/figure-10.perfetto.json"
        return
    fi
    measure figure-9 150 bench.paper.engine --paper --json "$out/figure-9.json" $(picture figure-9.png)
    measure figure-10 260 bench.paper.end_to_end --requests 16 --seconds 4 --until 8 --honesty 1 \
        --json "$out/figure-10.json" $(picture figure-10.png) --timeline "$out/figure-10.perfetto.json"
    measure figure-11 170 bench.paper.end_to_end --homogeneous 256,64 --requests 16 --seconds 4 --until 8 \
        --honesty 0 --json "$out/figure-11.json" $(picture figure-11.png)
}

peers() {
    if [ -n "$cpu" ]; then
        measure peers 300 bench.compare --ours engine --model demo --requests 0 --equal 1,4 --rounds 1 --rest 0.1 \
            --max-batch-size 4 --json "$out/peers.json"
        return
    fi
    if [ -z "${PEERS:-}${list:-}" ]; then
        echo "== peers: PEERS names no interpreter with torch and transformers; left out"
        return
    fi
    # They share the GPU's memory, JAX holding a part of it.
    under="env XLA_PYTHON_CLIENT_MEM_FRACTION=0.3"
    measure peers-gpt2 580 bench.compare --ours engine --peer transformers="${PEERS:-PYTHON}" \
        --peer transformers-compiled="${PEERS:-PYTHON}" --peer transformers-continuous="${PEERS:-PYTHON}" \
        ${VLLM:+--peer vllm="$VLLM"} --rounds 2 --dtype bfloat16 \
        --arguments 'transformers-continuous={"max_memory_percent":0.2}' \
        ${VLLM:+--arguments 'vllm={"gpu_memory_utilization":0.2}'} --json "$out/peers-gpt2.json"
    under=
}

all="correct experts latent tokens increments initiations beside iteration updates big big_no_graphs"
all="$all big_no_triton big_skip_temp small start figures peers"
for part in ${*:-$all}; do
    case " $all " in
    *" $part "*) "$part" ;;
    *) echo "$part is no part; they are $all" >&2; exit 2 ;;
    esac
done
[ -z "$failed" ] || { echo "== failed:$failed"; exit 1; }
