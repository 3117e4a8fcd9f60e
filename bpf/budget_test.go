package bpf

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/maps/mapstest"
	"github.com/sluice-lb/sluice/test/lab"
)

// budgets limit the instructions that the verifier walks to verify a program. They are far below the
// kernel's limit of a million, and well above the present number on any tested kernel. They are raised on
// purpose only: a change that doubles a number may break on the next kernel.
var budgets = map[string]uint32{
	"connect4":     65_000, // 58,000 on 6.18: the address that a socket is bound to is looked for, too
	"connect6":     65_000, // 46,000 on 6.18: all devices and addresses of a namespace are looked at
	"sendmsg4":     70_000,
	"sendmsg6":     70_000,
	"recvmsg4":     1_000,
	"recvmsg6":     1_500,
	"getpeername4": 200,
	"getpeername6": 800,
	"sock_release": 1_300, // 1,060 on 6.18: what a datagram has answered is noted
	"syn_timeout":  1000,  // Linux 6.1 walks more than newer kernels
	"socks":        400,
	"connected":    1_500,
	"dials":        1_000,

	"inet_sock_set_state": 15_000,
	"tcp_retransmit_skb":  2_000,

	"ingress": 225_000, // 222,000 on 6.18
	"egress":  160_000, // 152,000 on 6.18: of uplinks, which open flows for the node's own processes, and drop errors about SYNs
}

func TestVerifierBudget(t *testing.T) {
	m := mapstest.MustCreate(t, nil)
	for _, mode := range []UDPMode{UDPOff, UDPAll} {
		for _, setRetval := range []bool{true, false} {
			t.Run(fmt.Sprintf("kept with UDP mode %d and set_retval %v", mode, setRetval), func(t *testing.T) {
				if setRetval {
					needsSetRetval(t)
				}
				programs := mustLoad(t, m, Config{
					UDP: mode, SetRetval: setRetval, UDPIdle: time.Second, PodOptOut: true,
					Handshakes: knowsTracing(t), BackendHandshakes: true, Heal: knowsTracing(t), Resteer: true,
				})
				for _, hook := range append(slices.Concat(programs.Sock, programs.Trace), Hook{Name: "socks", Program: programs.Socks}) {
					checkBudget(t, hook)
				}
			})
		}
	}
}

func TestIteratorVerifierBudget(t *testing.T) {
	lab.NeedsRoot(t)
	iterators, err := LoadIterators()
	lab.Must(t, err)
	defer iterators.Close()
	checkBudget(t, Hook{Name: "connected", Program: iterators.Connected})
	checkBudget(t, Hook{Name: "dials", Program: iterators.Dials})
}

// Every kind of device has programs of its own.
func TestDeviceVerifierBudget(t *testing.T) {
	m := mapstest.MustCreate(t, nil)
	for _, class := range []uint32{maps.DevicePods, maps.DeviceUplink} {
		for _, flags := range []DeviceConfig{
			{},
			{FIBSource: true, ChecksumIPv6: true, Conntrack: knowsConntrack(t), Heal: true, Resteer: true},
			{NoEthernet: true},
			{BridgePort: true},
			{BridgePort: true, ScopeBySource: true, FIBSource: true, ChecksumIPv6: true, Conntrack: knowsConntrack(t), Heal: true, Resteer: true},
		} {
			cfg := flags
			cfg.Class = class
			t.Run(fmt.Sprintf("kept with %+v", cfg), func(t *testing.T) {
				programs := mustLoadDevice(t, m, cfg)
				checkBudget(t, Hook{Name: "ingress", Program: programs.Ingress})
				checkBudget(t, Hook{Name: "egress", Program: programs.Egress})
			})
		}
	}
}

func checkBudget(t *testing.T, hook Hook) {
	t.Helper()
	info, err := hook.Program.Info()
	lab.Must(t, err)
	walked, ok := info.VerifiedInstructions()
	if !ok {
		t.Skip("this kernel does not report the number of verified instructions (Linux 5.16)")
	}
	t.Logf("%s: %d", hook.Name, walked)
	if budget, ok := budgets[hook.Name]; !ok || walked > budget {
		t.Errorf("%s: %d instructions walked, budget %d", hook.Name, walked, budget)
	}
}

func mustLoadDevice(t testing.TB, m *maps.Pinned, cfg DeviceConfig) *DevicePrograms {
	t.Helper()
	programs, err := LoadDevice(m, cfg)

	return mustVerify(t, programs, err)
}

// mustVerify fails the test if programs could not be loaded, and closes them with the test.
func mustVerify[P io.Closer](t testing.TB, programs P, err error) P {
	t.Helper()
	if verifier := new(ebpf.VerifierError); errors.As(err, &verifier) {
		t.Fatalf("%+v", verifier)
	}
	lab.Must(t, err)
	t.Cleanup(func() { lab.Must(t, programs.Close()) })

	return programs
}

// needsSetRetval skips a test where connect and sendmsg hooks cannot choose their errno.
func needsSetRetval(t *testing.T) {
	t.Helper()
	knows, err := KnowsSetRetval()
	lab.Must(t, err)
	if !knows {
		if atLeast(t, 6, 1) {
			t.Error("this kernel is new enough, and does not know")
		}
		t.Skip("this kernel has no bpf_set_retval (Linux 6.1)")
	}
}

func knowsTracing(t *testing.T) bool {
	t.Helper()
	knows, err := KnowsTracing()
	lab.Must(t, err)

	return knows
}

func mustLoad(t *testing.T, m *maps.Pinned, cfg Config) *Programs {
	t.Helper()
	programs, err := Load(m, cfg)
	if err == nil {
		err = programs.NotTraced
	}

	return mustVerify(t, programs, err)
}
