#!/usr/bin/env bash
#
# run.sh [NAME...]
#
# Breaks the product in one small way at a time, and checks that a test fails.
# NAME.patch begins with the promise that it breaks and the test that guards it:
#
#	Breaks: a flow keeps its backend when its Service is deleted.
#	Test: ./bpf -run 'TestBackendGone'
#
# Without names all patches run. Each is applied to HEAD in a git worktree, so
# changes that are not committed play no part. Before that, the tests have to
# pass without a patch. The exit status is 0 if every mutant is caught. A mutant
# that does not apply, does not build, or whose programs the verifier refuses
# shows nothing: its patch has to be corrected.

set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) || exit
cd "$here/../.." || exit

# A test that takes longer with a mutant counts as failed.
test_seconds=120

scratch=$(mktemp -d)
tree=$scratch/tree
running=

clean() {
	if [[ -n $running ]]; then
		kill "$running" 2>/dev/null
		wait "$running"
	fi
	git worktree remove --force "$tree" 2>/dev/null
	rm -rf "$scratch"
}
trap clean EXIT
trap 'exit 130' INT TERM

# watched FUNCTION... runs a function in the background, so that an interrupt ends it, and keeps its
# output. The function replaces its shell by the command that it runs.
watched() {
	local status

	"$@" >"$scratch/output" 2>&1 </dev/null &
	running=$!
	wait "$running"
	status=$?
	running=
	return "$status"
}

# field NAME PATCH prints a field of the patch's first lines.
field() {
	sed -n "/^diff /q; s/^$1: //p" "$2"
}

# build PACKAGE makes the package's test binary.
build() {
	cd "$tree" && exec go test -c -o "$scratch/test" "$1"
}

# run_tests PACKAGE EXPRESSION SECONDS runs tests of the binary, until the first one fails.
run_tests() {
	cd "$tree/$1" && exec timeout --kill-after=10 "$3" "$scratch/test" -test.run "$2" -test.failfast
}

generate() {
	cd "$tree" && exec go generate ./maps ./bpf
}

# test_unpatched PACKAGE EXPRESSION checks that the tests pass while nothing is broken.
test_unpatched() {
	if ! watched build "$1" || ! watched run_tests "$1" "$2" $((10 * test_seconds)); then
		cat "$scratch/output"
		echo "run.sh: these tests of $1 fail without a mutant: $2" >&2
		exit 1
	fi
}

# try PATCH applies it, runs its test, and sets result.
try() {
	local package expression

	read -r package _ expression < <(field Test "$1")
	expression=${expression//\'/}
	if ! git -C "$tree" apply "$1" 2>"$scratch/output"; then
		result='does not apply'
		return
	fi
	if grep -q '^+++ .*\.[ch]$' "$1" && ! watched generate; then
		result='does not build'
		return
	fi
	if ! watched build "$package"; then
		result='does not build'
		return
	fi
	if watched run_tests "$package" "$expression" "$test_seconds"; then
		result=survived
	elif grep -q 'load program' "$scratch/output"; then
		result='is refused by the verifier'
	else
		result=caught
	fi
}

patches=()
for name in "$@"; do
	patches+=("$here/${name%.patch}.patch")
done
[[ $# -gt 0 ]] || patches=("$here"/*.patch)

declare -A expressions
for patch in "${patches[@]}"; do
	[[ -r $patch && -n $(field Breaks "$patch") && -n $(field Test "$patch") ]] || {
		echo "run.sh: $patch: not a patch that begins with Breaks: and Test:" >&2
		exit 2
	}
	read -r package _ expression < <(field Test "$patch")
	expressions[$package]+="${expressions[$package]:+|}${expression//\'/}"
done

git worktree prune
git worktree add --quiet --detach "$tree" HEAD || exit
for package in "${!expressions[@]}"; do
	test_unpatched "$package" "${expressions[$package]}"
done

caught=0
for patch in "${patches[@]}"; do
	name=$(basename "$patch" .patch)
	SECONDS=0
	try "$patch"
	printf '%-40s %s, %d s\n' "$name" "$result" "$SECONDS"
	if [[ $result == caught ]]; then
		((caught++))
	else
		printf '\t%s\n\t%s\n' "$(field Breaks "$patch")" "$(field Test "$patch")"
		tail -n 20 "$scratch/output" | sed 's/^/\t/'
	fi
	git -C "$tree" reset --quiet --hard
	git -C "$tree" clean --quiet -df
done
echo "$caught of ${#patches[@]} mutants caught"
[[ $caught -eq ${#patches[@]} ]]
