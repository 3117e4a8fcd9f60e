#!/usr/bin/env bash
#
# images.sh FOLDER BINARIES
#
# Writes the images that the pods of a cluster run beside Sluice's as archives to FOLDER:
# pod.tar has the program in pod/, coredns.tar has CoreDNS from the folder BINARIES.

set -euo pipefail

folder=$1 binaries=$2
cd "$(dirname "${BASH_SOURCE[0]}")"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# image NAME BINARY ARGUMENT makes the image localhost/NAME:cluster of one file.
image() {
	local buildah=(buildah --root "$scratch/storage" --runroot "$scratch/run" --storage-driver vfs) container

	container=$("${buildah[@]}" from scratch)
	"${buildah[@]}" copy --quiet --chmod 0755 "$container" "$2" "/usr/bin/$1" >/dev/null
	"${buildah[@]}" config --entrypoint "[\"/usr/bin/$1\"]" --cmd "$3" "$container"
	"${buildah[@]}" commit --quiet --format oci "$container" "oci-archive:$folder/$1.tar:localhost/$1:cluster" >/dev/null
}

CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags '-s -w' -o "$scratch/pod" ./pod
image pod "$scratch/pod" pause
image coredns "$binaries/coredns" -version
