#!/usr/bin/env bash
#
# kernel.sh VERSION
#
# Fetches the kernel of the Debian release that has this version of Linux, from
# Debian's mirror. The last line of its output is the folder that has it, with
# vmlinuz and lib/modules:
#
#   ${SLUICE_TEST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/sluice}/kernels/<version>
#
# What is there already is not fetched again: remove the folder for a newer one.
# The sources and packages of this machine's own apt stay as they are.

set -euo pipefail

version=$1
case $version in
5.10) release=bullseye ;;
6.1) release=bookworm ;;
6.12) release=trixie ;;
*)
	echo "test/kernels/kernel.sh: Debian has Linux 5.10, 6.1 and 6.12, not $version" >&2
	exit 1
	;;
esac

cache=${SLUICE_TEST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/sluice}/kernels
mkdir -p "$cache"
cache=$(cd "$cache" && pwd)
folder=$cache/$version

exec {lock}>"$cache/.lock"
flock "$lock"

if [[ -d $folder ]]; then
	echo "$folder"
	exit
fi

work=$(mktemp -d "$cache/.$version.XXXXXX")
trap 'rm -rf "$work"' EXIT
cd "$work"

# A state of its own makes this apt know nothing but the one release.
mkdir -p lists/partial archives/partial
touch status
cat >apt.conf <<EOF
Dir::State "$work";
Dir::State::status "$work/status";
Dir::Cache "$work";
Dir::Etc::sourcelist "$work/sources.list";
Dir::Etc::sourceparts "-";
APT::Architecture "amd64";
APT::Sandbox::User "root";
Acquire::Languages "none";
Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
EOF
export APT_CONFIG=$work/apt.conf

# Releases move to the archive when their support ends.
for mirror in "${SLUICE_DEBIAN_MIRROR:-http://deb.debian.org/debian}" http://archive.debian.org/debian; do
	echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $release main" >sources.list
	if apt-get update -q --error-on=any >&2; then
		break
	fi
done

package=$(apt-cache depends linux-image-amd64 | awk '$1 == "Depends:" { print $2 }')
apt-get download -q "$package" >&2
dpkg-deb -x ./"$package"_*.deb image

mkdir -p new/lib
mv image/boot/vmlinuz-* new/vmlinuz
# Since Debian 13 the modules are below /usr.
mv image/{,usr/}lib/modules new/lib/ 2>/dev/null || true
depmod -b new "${package#linux-image-}"
mv new "$folder"

echo "$folder"
