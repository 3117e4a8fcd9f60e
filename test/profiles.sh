#!/usr/bin/env bash
#
# profiles.sh [PROFILE]...
#
# Runs all packages of tests that ask for a profile with each of these, by default
# with all that test/lab/profile.go has. The last line names the runs that failed.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mapfile -t packages < <(grep -rl 'lab\.UseProfile(' --include='*_test.go' test | xargs -n1 dirname | sort -u)
mapfile -t all < <(sed -n 's/^\t*Name: *"\(.*\)",$/\1/p' test/lab/profile.go)
[[ $# -gt 0 ]] || set -- "${all[@]}"

failed=()
for profile in "$@"; do
	echo "=== profile $profile"
	SLUICE_TEST_PROFILE=$profile go test -count=1 -timeout 40m "${packages[@]/#/./}" || failed+=("$profile")
done
if [[ ${#failed[@]} -gt 0 ]]; then
	echo "=== FAILED with: ${failed[*]}"
	exit 1
fi
echo "=== all passed with each of: $*"
