# The verbs of this repository. Each makes sure of what it needs (tools, mounts and
# root) by test/setup.sh, which takes no time when all is there.

version := $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
platforms := linux/amd64 linux/arm64
image := bin/image
go_build := CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags '-s -w -X main.version=$(version)'

.PHONY: FORCE help setup build image test check lint generate demo bench bench-heal microbench cluster cluster-down test-cluster kernels kernelssmoke kernelsarm kernelsrace profiles mutants clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile

setup: ## makes this machine ready for everything below
	test/setup.sh

build: ## bin/sluice, static
	$(go_build) -o bin/sluice ./cmd/sluice

# The same source, version and Go give the same files.
image: ready-image $(platforms:%=bin/%/sluice) ## bin/image and bin/image.tar, the container image as an OCI layout, without Docker
	deploy/image.sh $(image) '$(version)' $(platforms)

bin/linux/%/sluice: FORCE
	GOOS=linux GOARCH=$* $(go_build) -o $@ ./cmd/sluice

demo: ready-demo build ## shows what Sluice does, in a minute, on this machine
	$(go_build) -o bin/sluice-demo ./test/demo
	bin/sluice-demo

# What the same user has tested with the same sources, kernel and packages is not tested again. go
# does not see what bench, a module of its own, builds of this one.
tested_on = $(shell uname -srvm; id -u; stat -c %Y /var/lib/dpkg/status 2>/dev/null)
test: ready-test ## all tests; the first time it builds a Kubernetes to test against
	SLUICE_TEST_KERNEL='$(tested_on)' go test -timeout 20m ./...
	cd bench && go test -count=1 -timeout 20m ./...

check: lint ## what needs neither root nor a kernel: linters, policies, the writer, manifests and docs; in a minute
	SLUICE_TEST_KERNEL=none go test . ./bpf ./cmd/... ./maps/... ./pkg/... ./test/compat ./test/deploy ./test/differential/model

# Without options it takes an hour, and measures more of everything.
bench: ready-bench build ## measures Sluice beside the real kube-proxy in ten minutes, and writes bench-report/
	cd bench && $(go_build) -o ../bin/sluice-bench ./run
	bin/sluice-bench --sluice bin/sluice --services 1000 --rounds 3 --duration 300ms --sustained 3s --changes 20 --updates 300

bench-heal: ready-bench build ## measures what clients notice of backends that die, beside the real kube-proxy, in 25 minutes, and writes docs/performance/heal.md
	cd bench && $(go_build) -o ../bin/sluice-bench-heal ./heal
	go test -run '^$$' -bench Healing -benchtime 100x ./pkg/datapath > bin/healing.txt
	bin/sluice-bench-heal --sluice bin/sluice --output docs/performance/heal.md; measured=$$?; \
	(printf '\n## While all is well\n\n'; tr '\t' '\n' < bin/healing.txt | sed 's/^/    /') >> docs/performance/heal.md; \
	exit $$measured

microbench: ready-bench ## benchmarks of single steps: a packet, a system call, a start of the agent
	go test -run '^$$' -bench . -benchmem ./pkg/reconcile ./pkg/lb ./bpf
	cd bench && go test -run '^$$' -bench . -benchmem ./scale ./forward

cluster: ready-cluster image bin/sluice-cluster ## a whole cluster of two nodes to play with, until Ctrl-C or make cluster-down
	bin/sluice-cluster

bin/sluice-cluster: FORCE
	go build -o $@ ./test/realcluster/up

cluster-down: bin/sluice-cluster ## ends the cluster that make cluster has brought up, and waits until all of it is removed
	bin/sluice-cluster --down

test-cluster: ready-cluster image ## installs Sluice in a whole cluster, and replaces, kills and drains under load; the first time it builds a kubelet and containerd
	SLUICE_TEST_CLUSTER=1 go test -count=1 -timeout 20m -v ./test/realcluster

kernels: ## the tests on other kernels, in virtual machines; takes hours
	SLUICE_TEST_MATRIX=test/kernels/README.md test/kernels/run.sh

smoke = SLUICE_TEST_PACKAGES='./bpf ./pkg/datapath ./test/devices' SLUICE_TEST_RUN="$$(cat test/kernels/smoke)" SLUICE_TEST_SECONDS=600

kernelssmoke: ## some of them, on the oldest and the newest kernel, in ten minutes
	$(smoke) test/kernels/run.sh 5.10 7.3

kernelsarm: ## the same on arm64
	$(smoke) test/kernels/run.sh 6.12-arm64

kernelsrace: ## programs are loaded with the race detector, beside a hundred modules
	SLUICE_TEST_RACE=1 SLUICE_TEST_PACKAGES=./bpf SLUICE_TEST_RUN=TestProgramsLoadAtOnce test/kernels/run.sh 7.3

# Each package that asks for a profile, with each of them.
profiles: ready-test ## the suites on nodes set up in each of the ways that nodes are, see test/README.md; takes hours
	test/profiles.sh

mutants: ready-test ready-generate ## breaks the product in one small way at a time: a test has to fail; takes half an hour
	test/mutants/run.sh

# Not ST1005: what is wrong may have a capital in its name, as a Service has.
lint: ready-lint ## formatting, vet and static analysis
	gofmt -d .
	go vet ./...
	go tool staticcheck -checks inherit,-ST1005 ./...
	clang-format-19 --dry-run -Werror bpf/*.c bpf/lib/*.h maps/*.c maps/*.h
	shellcheck .ci/run $$(find test deploy -name '*.sh')
	go mod tidy -diff
	cd bench && go vet ./... && $$(cd .. && go tool -n staticcheck) -checks inherit,-ST1005 ./... && go mod tidy -diff
	cd test/deploy/helm && go vet ./... && go mod tidy -diff
	cd test/ui && go vet ./... && go mod tidy -diff

# Always at the same addresses, because clang orders some types by them.
generate: ready-generate ## the Go types and objects that are made from C
	setarch --addr-no-randomize go generate ./...

clean:
	rm -rf bin

ready-%:
	@test/setup.sh $*
