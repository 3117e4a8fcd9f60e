# The image that `make image` writes without Docker; deploy/image says the same
# in Go, and its test compares.
#
#   docker buildx build --platform linux/amd64,linux/arm64 --build-arg VERSION=v1.2.3 .

FROM --platform=$BUILDPLATFORM golang:1.26.8 AS build
ARG TARGETOS
ARG TARGETARCH
ARG VERSION=unknown
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY bpf bpf
COPY cmd cmd
COPY maps maps
COPY pkg pkg
RUN CGO_ENABLED=0 GOOS=$TARGETOS GOARCH=$TARGETARCH go build -trimpath -buildvcs=false \
	-ldflags "-s -w -X main.version=$VERSION" -o /sluice ./cmd/sluice

FROM scratch
ARG VERSION=unknown
LABEL org.opencontainers.image.title="sluice" \
	org.opencontainers.image.description="Kubernetes Services without kube-proxy" \
	org.opencontainers.image.source="https://github.com/sluice-lb/sluice" \
	org.opencontainers.image.licenses="Apache-2.0 AND (GPL-2.0-only OR BSD-2-Clause)" \
	org.opencontainers.image.version="$VERSION"
ENV PATH="/usr/bin"
COPY --from=build --chmod=0755 /sluice /usr/bin/sluice
USER 0:0
ENTRYPOINT ["/usr/bin/sluice"]
