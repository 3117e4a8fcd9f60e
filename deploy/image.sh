#!/usr/bin/env bash
#
# image.sh FOLDER VERSION PLATFORM...
#
# Writes the image of the Dockerfile to FOLDER, as an OCI layout with an index of these
# platforms, whose binaries are in bin/PLATFORM. FOLDER.tar is the layout in one file.
# The same binaries and version give the same digest. The image is localhost/sluice:VERSION:
# no registry has that name, so that nodes pull nothing from one.

set -euo pipefail

folder=$1 name=localhost/sluice:$2 version=$2
shift 2
platforms=$(IFS=,; echo "$*")

if ! [[ $version =~ ^[[:alnum:]_][[:alnum:]_.-]{0,127}$ ]]; then
	echo "image.sh: version $version: not a tag of an image" >&2
	exit 1
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
buildah=(buildah --root "$scratch/storage" --runroot "$scratch/run" --storage-driver vfs)

"${buildah[@]}" build --quiet --isolation chroot --format oci --timestamp 0 --identity-label=false \
	--platform "$platforms" --manifest "$name" --build-arg VERSION="$version" . >/dev/null
rm -rf "$folder"
"${buildah[@]}" manifest push --quiet --all "$name" "oci:$folder:$name"
tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX \
	-C "$folder" -cf "$folder.tar" blobs index.json oci-layout
echo "$folder and $folder.tar: $name"
