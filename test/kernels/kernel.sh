#!/usr/bin/env bash
#
# kernel.sh VERSION
# kernel.sh VERSION-arm64
#
# Fetches the kernel of the Debian release that has this version of Linux, from
# Debian's mirror. The last line of its output is the folder that has it, with
# vmlinuz and lib/modules, and for another architecture than amd64 with programs
# for it, and what they are linked to, in userland:
#
#   ${SLUICE_TEST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/sluice}/kernels/<version>
#
# What is there already is not fetched again: remove the folder for a newer one.
# The sources and packages of this machine's own apt stay as they are.

set -euo pipefail

version=$1 number=${1%-arm64} architecture=amd64
[[ $version == "$number" ]] || architecture=arm64
case $number in
5.10) release=bullseye ;;
6.1) release=bookworm ;;
6.12) release=trixie ;;
7.2) release=testing ;;
7.3) release=trixie-backports ;;
*)
	echo "test/kernels/kernel.sh: Debian has Linux 5.10, 6.1, 6.12, 7.2 and 7.3, not $version" >&2
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
APT::Architecture "$architecture";
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

# depends lists the packages that a package depends on, of those whose names match a pattern.
depends() {
	apt-cache depends "$1" | awk -v pattern="$2" '$1 == "Depends:" && $2 ~ pattern { print $2 }'
}

image=$(depends "linux-image-$architecture" ^linux-image-)
linux=${image#linux-image-}
# Releases that are not stable move on.
if [[ $linux != "$number".* ]]; then
	echo "test/kernels/kernel.sh: $release has Linux $linux by now, and no $number" >&2
	exit 1
fi
# Since Linux 7 the image is empty, and depends on packages that have its parts.
for package in "$image" $(depends "$image" "^linux-(base|binary|modules)-[0-9]"); do
	apt-get download -q "$package" >&2
done
for package in *.deb; do
	dpkg-deb -x "$package" image
done

mkdir -p new/lib
# Since Debian 13 the modules are below /usr, and since Linux 7 the kernel is beside them.
find image -name 'vmlinuz*' -type f -exec mv {} new/vmlinuz \;
mv image/{,usr/}lib/modules new/lib/ 2>/dev/null || true
depmod -b new "$linux"
if [[ $architecture != amd64 ]]; then
	apt-get install -qy --download-only --no-install-recommends busybox-static nftables >&2
	for package in archives/*.deb; do
		dpkg-deb -x "$package" new/userland
	done
fi
mv new "$folder"

echo "$folder"
