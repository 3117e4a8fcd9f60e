package bpf

import (
	"fmt"
	stdmaps "maps"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/features"
)

// KnowsTracing reports whether programs at tracepoints can read the storage of sockets (Linux 5.11).
func KnowsTracing() (bool, error) {
	version, err := features.LinuxVersionCode()
	if err != nil {
		return false, fmt.Errorf("version of the kernel: %w", err)
	}

	return version >= 5<<16|11<<8, nil
}

// traced is a tracepoint, and the program that runs there.
type traced struct{ point, program string }

// tracedBy returns what is traced with this configuration.
func tracedBy(cfg Config) []traced {
	var all []traced
	if cfg.Handshakes && !cfg.NoStats || cfg.Heal {
		all = append(all,
			traced{"inet_sock_set_state", traceProgSluiceHandshake},
			traced{"tcp_retransmit_skb", traceProgSluiceRetransmit})
	}

	return all
}

// TraceHooks returns the tracepoints that are used with this configuration, without programs.
func TraceHooks(cfg Config) []Hook { return traceHooks(cfg, nil) }

func traceHooks(cfg Config, programs map[string]*ebpf.Program) []Hook {
	var hooks []Hook
	for _, t := range tracedBy(cfg) {
		hooks = append(hooks, Hook{t.point, ebpf.AttachTraceRawTp, programs[t.program]})
	}

	return hooks
}

const tracingPart = "tracing programs"

// traceNames returns the names of the tracing programs.
func traceNames(cfg Config) []string {
	var names []string
	for _, t := range tracedBy(cfg) {
		names = append(names, t.program)
	}

	return names
}

// traceSpec returns the tracing programs.
func traceSpec(cfg Config) (*ebpf.CollectionSpec, error) {
	spec, err := loadTrace()
	if err != nil {
		return nil, err
	}
	stdmaps.DeleteFunc(spec.Programs, func(name string, _ *ebpf.ProgramSpec) bool {
		return !slices.Contains(traceNames(cfg), name)
	})

	return spec, setVariables(spec, map[string]any{traceVarConfigHeal: cfg.Heal, traceVarConfigBackendHandshakes: cfg.BackendHandshakes})
}
