package scale

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/bench/proxy"
	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

// node is a node with an agent.
//
//	API server 127.0.0.1 ── node-1 192.168.50.1
type node struct {
	*sluice.Node
	api *apiServer
}

// mustNode starts nothing but a fake API server.
func mustNode(b *testing.B, cluster map[string][]byte) *node {
	b.Helper()
	ns := lab.MustNew(b, lab.Config{Nodes: 1}).Nodes[0].Namespace
	api := mustServe(b, ns, cluster)
	n, err := sluice.NewNode(sluice.Config{
		Binary:     sluice.MustBinary(b),
		Namespace:  ns,
		Cgroup:     lab.MustCgroup(b, "scale"),
		NodeName:   nodeName,
		Kubeconfig: api.kubeconfig,
	})
	lab.Must(b, err)
	b.Cleanup(func() { lab.Must(b, n.Close()) })

	return &node{Node: n, api: api}
}

// mustStart starts the agent and waits until it has programmed everything. It
// looks at what the agent prints: to be asked takes its time.
func (n *node) mustStart(b *testing.B) {
	b.Helper()
	synced := strings.Count(n.Log(), "msg=synced")
	lab.Must(b, n.Start())
	for deadline := time.Now().Add(10 * time.Minute); strings.Count(n.Log(), "msg=synced") == synced; {
		if time.Now().After(deadline) {
			b.Fatalf("agent: not synced after ten minutes:\n%s", n.Log())
		}
		time.Sleep(time.Millisecond)
	}
}

// mustBeAttached returns when the programs of hooks were in force, by the agent's log.
func (n *node) mustBeAttached(b *testing.B) time.Time {
	b.Helper()
	var at time.Time
	lab.Eventually(b, "hooks are attached", func() error {
		before, _, attached := strings.Cut(n.Log(), " level=INFO msg=attached ")
		if !attached {
			return errors.New("the log does not say so")
		}
		var err error
		at, err = time.Parse(time.RFC3339, before[strings.LastIndex(before, "time=")+len("time="):])

		return err
	})

	return at
}

func (n *node) mustMaps(b *testing.B) *maps.Pinned {
	b.Helper()
	pinned, err := maps.Load(n.BPFRoot())
	lab.Must(b, err)
	b.Cleanup(func() { pinned.Close() })

	return pinned
}

// mustHold fails the benchmark unless all Services are in the maps.
func mustHold(b *testing.B, pinned *maps.Pinned) {
	b.Helper()
	fills, err := pinned.Fills()
	lab.Must(b, err)
	for _, fill := range fills {
		if fill.Name == maps.NameBackends && fill.Entries != serviceCount*endpointCount {
			b.Fatalf("there are %d backends in the maps, want %d", fill.Entries, serviceCount*endpointCount)
		}
	}
}

// mustCountWrites returns what [proxy.CountWrites] does.
func (n *node) mustCountWrites(b *testing.B) (calls, stores uint64) {
	b.Helper()
	status, err := n.Status()
	lab.Must(b, err)

	return proxy.CountWrites(status)
}

// mustReadProcess returns the memory of the agent, and how long it has run on a processor so far, of
// which /proc counts hundredths of a second.
func (n *node) mustReadProcess(b *testing.B) (procfs.ProcStatus, time.Duration) {
	b.Helper()
	process, err := procfs.NewProc(n.PID())
	lab.Must(b, err)
	memory, err := process.NewStatus()
	lab.Must(b, err)
	stat, err := process.Stat()
	lab.Must(b, err)

	return memory, time.Duration(stat.UTime+stat.STime) * 10 * time.Millisecond
}

// mustReadClock returns how long the agent has run on a processor so far, to the
// nanosecond, and without its children.
func (n *node) mustReadClock(b *testing.B) time.Duration {
	b.Helper()
	var spec unix.Timespec
	lab.Must(b, unix.ClockGettime(int32(^n.PID()<<3|2), &spec)) // CPUCLOCK_SCHED of a process

	return time.Duration(spec.Nano())
}

// mustReadMapMemory returns how many bytes the kernel has for a node's maps.
func (n *node) mustReadMapMemory(b *testing.B) float64 {
	b.Helper()
	sizes, err := n.mustMaps(b).Sizes()
	lab.Must(b, err)
	var sum float64
	for _, size := range sizes {
		b.Logf("%-14s %7.1f MB", size.Name, float64(size.Bytes)/1e6)
		sum += float64(size.Bytes)
	}

	return sum
}
