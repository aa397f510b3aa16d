#!/usr/bin/env bash
# From a model folder to an artifact that devices accept: dry run, build, verify, sign, verify the signature, run.
#
#   release.sh MODEL OUTPUT PRIVATE_KEY PUBLIC_KEY [options of `fastcar compile` ...]
#
# OUTPUT gets the artifact and the public key that devices need, and the JSON of every step. The first step that
# fails ends the script with its exit code: 1 where a backend differs, 2 for an error of the call or a file, 3 for a defect.
# FASTCAR_KEY_PASSPHRASE is the key's passphrase, VERIFY_TOKENS the number of steps that are compared, PROMPT the first token.
set -euo pipefail

if [ $# -lt 4 ]; then
    echo "usage: $0 MODEL OUTPUT PRIVATE_KEY PUBLIC_KEY [options of fastcar compile ...]" >&2
    exit 2
fi
model=$1 output=$2 private_key=$3 public_key=$4
shift 4
artifact=$output/artifact
mkdir -p "$output"

# step NAME COMMAND ...: run the command, keep its JSON, and stop where it fails.
step() {
    local name=$1 code=0
    shift
    "${FASTCAR:-fastcar}" "$@" --json >"$output/$name.json" || code=$?
    if [ "$code" -ne 0 ]; then
        echo "$name failed with exit code $code; $output/$name.json says why" >&2
        exit "$code"
    fi
    echo "$name: done" >&2
}

# field NAME KEY: a field of a step's JSON.
field() {
    python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$output/$1.json" "$2"
}

step dry_run compile "$model" --dry-run "$@"
step build compile "$model" -o "$artifact" "$@"
digest=$(field build digest)
step verify verify "$artifact" --digest "$digest" --tokens "${VERIFY_TOKENS:-64}"
step sign sign "$artifact" --key "$private_key"
if [ "$(field sign digest)" != "$digest" ]; then
    echo "the artifact that was signed is not the one that was built: see build.json and sign.json" >&2
    exit 2
fi

cp "$public_key" "$output/signing.pub"
step verify_signature verify-signature "$artifact" --key "$output/signing.pub" --digest "$digest"
step run run "$artifact" --public-key "$output/signing.pub" --prompt "${PROMPT:-16}" --num-tokens 16
echo "$digest"
