#!/usr/bin/env bash
#
# images.sh FOLDER BINARIES
#
# Writes the images that the pods of a cluster run beside that of `make image` as archives
# to FOLDER: pod.tar has the program in pod/, coredns.tar has CoreDNS from the folder
# BINARIES, and sluice.tar has another build of Sluice, to upgrade to.

set -euo pipefail

folder=$1 binaries=$2
cd "$(dirname "${BASH_SOURCE[0]}")"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# build FILE PACKAGE VERSION builds a static binary.
build() {
	CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags "-s -w -X main.version=$3" -o "$1" "$2"
}

# image NAME:TAG BINARY ARGUMENT makes the image localhost/NAME:TAG of one file.
image() {
	local buildah=(buildah --root "$scratch/storage" --runroot "$scratch/run" --storage-driver vfs)
	local name=${1%:*} container

	container=$("${buildah[@]}" from scratch)
	"${buildah[@]}" copy --quiet --chmod 0755 "$container" "$2" "/usr/bin/$name" >/dev/null
	"${buildah[@]}" config --entrypoint "[\"/usr/bin/$name\"]" --cmd "$3" "$container"
	"${buildah[@]}" commit --quiet --format oci "$container" "oci-archive:$folder/$name.tar:localhost/$1" >/dev/null
}

build "$scratch/pod" ./pod cluster
image pod:cluster "$scratch/pod" pause
build "$scratch/sluice" ../../cmd/sluice other
image sluice:other "$scratch/sluice" agent
image coredns:cluster "$binaries/coredns" -version
