package bpf

import (
	"bufio"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"sync/atomic"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/maps/mapstest"
	"github.com/sluice-lb/sluice/test/lab"
)

// spins is how often a delayed lookup reads the clock before it returns: some
// microseconds in all.
const spins = 100

// connectsEnv makes the executable of the test connect to the address in it, until its input ends.
const connectsEnv = "SLUICE_BPF_TEST_CONNECTS"

// The kernel gives the element of a deleted frontend to the next one that is added, even while a program
// reads it. Here every program is delayed between its lookup and its read, while two Services alternately
// come and go: no client of the one ever connects to the other's backend. SLUICE_CONNECTS=1000000 sets the
// number of connects.
func TestDelayedReaders(t *testing.T) {
	connects := 30_000
	if text := os.Getenv("SLUICE_CONNECTS"); text != "" {
		var err error
		connects, err = strconv.Atoi(text)
		lab.Must(t, err)
	}
	m := mapstest.MustCreate(t, nil)
	mine, other := netip.MustParseAddrPort("10.96.0.1:53"), netip.MustParseAddrPort("10.96.0.2:53")
	hand := mapstest.New(m.Tables)
	keys := make(map[netip.AddrPort]maps.FrontendKey)
	ids := make(map[netip.AddrPort]uint32)
	for at, backend := range map[netip.AddrPort]string{mine: "127.0.0.1:1001", other: "127.0.0.1:1002"} {
		port, err := hand.ServicePort()
		lab.Must(t, err)
		id, err := hand.Backend(port, netip.MustParseAddrPort(backend), 0)
		lab.Must(t, err)
		pool, err := hand.Pool(maps.Pool{ServicePortId: port}, []uint32{id}, nil)
		keys[at] = maps.FrontendKeyOf(at.Addr(), at.Port(), unix.IPPROTO_UDP, maps.ScopeInternal)
		lab.Must(t, err, hand.Mark(maps.AddrOf(at.Addr()), maps.AddrService, 0), hand.Frontend(keys[at], maps.KindClusterIP, pool))
		ids[at], _, err = m.FrontendIDs.Lookup(keys[at])
		lab.Must(t, err)
	}
	lab.Must(t, m.FrontendIDs.Delete(keys[other]))
	cgroup := lab.MustCgroup(t, "delayed")
	attachDelayed(t, m, cgroup)
	ns := lab.MustNamespace(t, "delayed")

	var done atomic.Bool
	changed := make(chan error)
	go func() {
		for !done.Load() {
			for _, swap := range [][2]netip.AddrPort{{mine, other}, {other, mine}} {
				if err := m.FrontendIDs.Delete(keys[swap[0]]); err != nil {
					changed <- err
					return
				}
				if err := m.FrontendIDs.Put(keys[swap[1]], ids[swap[1]]); err != nil {
					changed <- err
					return
				}
			}
		}
		changed <- nil
	}()
	right, wrong, refused := connectMany(t, ns, cgroup, mine, 1001, connects)
	done.Store(true)
	lab.Must(t, <-changed)
	t.Logf("%d connects: %d to the right backend, %d refused, %d to another", connects, right, refused, wrong)
	if wrong > 0 {
		t.Errorf("%d of %d connects went to another Service's backend", wrong, connects)
	}
	if right < connects/20 || refused < connects/20 {
		t.Errorf("%d of %d connects were right and %d refused: they did not coincide with the changes", right, connects, refused)
	}
}

// connectMany lets two processes connect to at, and returns how often they reached the port want, another
// one, and none.
func connectMany(t *testing.T, ns *lab.Namespace, cgroup *lab.Cgroup, at netip.AddrPort, want, connects int) (right, wrong, refused int) {
	t.Helper()
	const processes = 2
	var outputs []*bufio.Reader
	for range processes {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %d %d", connectsEnv, at, want, connects/processes))
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		lab.Must(t, err, lab.Start(ns, cgroup, cmd))
		t.Cleanup(func() { cmd.Wait() })
		outputs = append(outputs, bufio.NewReader(out))
	}
	for _, out := range outputs {
		var r, w, f int
		if _, err := fmt.Fscanf(out, "%d %d %d\n", &r, &w, &f); err != nil {
			t.Fatal(err)
		}
		right, wrong, refused = right+r, wrong+w, refused+f
	}

	return right, wrong, refused
}

// connectAgainAndAgain is the process of connectMany: "address port times".
func connectAgainAndAgain(what string) error {
	var at string
	var want, times, right, wrong, refused int
	if _, err := fmt.Sscanf(what, "%s %d %d", &at, &want, &times); err != nil {
		return err
	}
	addr := netip.MustParseAddrPort(at)
	to := &unix.SockaddrInet4{Addr: addr.Addr().As4(), Port: int(addr.Port())}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		return err
	}
	for range times {
		if err := unix.Connect(fd, to); err != nil {
			refused++

			continue
		}
		peer, err := unix.Getpeername(fd)  // the backend: only connect hooks are attached
		if errors.Is(err, unix.ENOTCONN) { // refused, where hooks cannot choose their error
			refused++

			continue
		}
		if err != nil {
			return err
		}
		if got := peer.(*unix.SockaddrInet4).Port; got == want {
			right++
		} else {
			wrong++
		}
	}
	_, err = fmt.Println(right, wrong, refused)

	return err
}

// attachDelayed attaches connect hooks with delayed lookups of frontends until the test ends. They refuse
// destinations of no Service.
func attachDelayed(t *testing.T, m *maps.Pinned, cgroup *lab.Cgroup) {
	t.Helper()
	lab.Must(t, mapstest.New(m.Tables).ServiceCIDR(netip.MustParsePrefix("10.96.0.0/16")))
	spec, err := sockSpec(Config{UDP: UDPAll, SetRetval: atLeast(t, 6, 1)})
	lab.Must(t, err)
	own := newLoader(m).single(spec, sockProgSluiceConnect4)
	delayLookups(t, own.Programs[sockProgSluiceConnect4], "sl_frontend_ids")
	program, err := newLoader(m).loadOne(own, sockProgSluiceConnect4)
	lab.Must(t, err)
	t.Cleanup(func() { program.Close() })
	attached, err := link.AttachCgroup(link.CgroupOptions{
		Path: cgroup.Path(), Attach: ebpf.AttachCGroupInet4Connect, Program: program,
	})
	lab.Must(t, err)
	t.Cleanup(func() { attached.Close() })
}

// delayLookups replaces each lookup in a map by a call of a slow function.
func delayLookups(t *testing.T, program *ebpf.ProgramSpec, name string) {
	t.Helper()
	const slow = "slow_lookup"
	delayed := 0
	for i := range program.Instructions {
		if program.Instructions[i].Reference() != name {
			continue
		}
		for n := i; n < len(program.Instructions); n++ {
			if in := &program.Instructions[n]; in.IsBuiltinCall() && in.Constant == int64(asm.FnMapLookupElem) {
				*in = asm.Call.Label(slow).WithMetadata(in.Metadata)
				*in = in.WithReference(slow)
				delayed++

				break
			}
		}
	}
	if delayed == 0 {
		t.Fatalf("program %s looks nothing up in %s", program.Name, name)
	}
	// The kernel requires the position of each function in the source.
	whole := &btf.Func{
		Name: slow, Linkage: btf.StaticFunc,
		Type: &btf.FuncProto{Return: &btf.Pointer{Target: &btf.Void{}}, Params: []btf.FuncParam{
			{Name: "map", Type: &btf.Pointer{Target: &btf.Void{}}}, {Name: "key", Type: &btf.Pointer{Target: &btf.Void{}}},
		}},
	}
	program.Instructions = append(program.Instructions,
		btf.WithFuncMetadata(asm.FnMapLookupElem.Call().WithSymbol(slow).WithSource(program.Instructions[0].Source()), whole),
		asm.Mov.Reg(asm.R6, asm.R0),
		asm.Mov.Imm(asm.R7, spins),
		asm.FnKtimeGetNs.Call().WithSymbol("spin"),
		asm.Add.Imm(asm.R7, -1),
		asm.JNE.Imm(asm.R7, 0, "spin"),
		asm.Mov.Reg(asm.R0, asm.R6),
		asm.Return(),
	)
}
