# The image of Sluice: one static binary for each platform, built by the Makefile.
# `make image` writes it by buildah, without a container engine.

FROM scratch
ARG TARGETPLATFORM
ARG VERSION=unknown
LABEL org.opencontainers.image.title="sluice" \
	org.opencontainers.image.description="Kubernetes Services without kube-proxy" \
	org.opencontainers.image.source="https://github.com/sluice-lb/sluice" \
	org.opencontainers.image.licenses="Apache-2.0 AND (GPL-2.0-only OR BSD-2-Clause)" \
	org.opencontainers.image.version="$VERSION"
ENV PATH="/usr/bin"
COPY --chmod=0755 bin/$TARGETPLATFORM/sluice /usr/bin/sluice
USER 0:0
ENTRYPOINT ["/usr/bin/sluice"]
