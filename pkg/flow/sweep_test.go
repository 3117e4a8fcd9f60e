package flow

import (
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

const (
	tcp  = unix.IPPROTO_TCP
	udp  = unix.IPPROTO_UDP
	sctp = unix.IPPROTO_SCTP

	fromClient  = maps.FlowFromClient
	toClient    = maps.FlowToClient
	toBackend   = maps.FlowToBackend
	fromBackend = maps.FlowFromBackend
)

// The state and the timeout of flows, by their entries.
func TestStates(t *testing.T) {
	const newly, open, fin, reset = maps.FlowNew, maps.FlowOpen, maps.FlowFin, maps.FlowReset
	for _, test := range []struct {
		name    string
		proto   uint8
		notes   []note
		want    State
		timeout time.Duration
	}{
		{"opening after a SYN", tcp, []note{{fromClient, newly, true, 0}, {toClient, newly, true, 0}}, Opening, 120 * time.Second},
		{"opening after its answer", tcp, []note{{fromClient, newly, true, 0}, {toClient, open, true, 0}}, Opening, 120 * time.Second},
		{"opening after an INIT", sctp, []note{{fromClient, newly, true, 0}, {toClient, newly, true, 0}}, Opening, 120 * time.Second},
		{"established", tcp, []note{{fromClient, open, false, 0}, {toClient, open, false, 0}}, Established, 24 * time.Hour},
		{"established, of SCTP", sctp, []note{{fromClient, open, false, 0}, {toClient, open, false, 0}}, Established, 24 * time.Hour},
		{"established by the one entry that has moved", tcp, []note{{fromClient, open, false, 0}, {toClient, open, true, 0}}, Established, 24 * time.Hour},
		{"established by the one entry that is left", tcp, []note{{toBackend, open, false, 0}}, Established, 24 * time.Hour},
		{"closing by the client", tcp, []note{{fromClient, fin, false, 0}, {toClient, open, false, 0}}, Closing, time.Hour},
		{"closing by the backend", tcp, []note{{fromClient, open, false, 0}, {toClient, fin, false, 0}}, Closing, time.Hour},
		{"closing by the client, whom two entries saw", tcp, []note{{fromClient, fin, false, 0}, {toBackend, fin, false, 0}, {toClient, open, false, 0}}, Closing, time.Hour},
		{"closing by the backend, whom two entries saw", tcp, []note{{fromBackend, fin, false, 0}, {toClient, fin, false, 0}}, Closing, time.Hour},
		{"closed by both", tcp, []note{{fromClient, fin, false, 0}, {toClient, fin, false, 0}}, Closed, 10 * time.Second},
		{"closed by both, as the backend's side saw them", sctp, []note{{toBackend, fin, false, 0}, {fromBackend, fin, false, 0}}, Closed, 10 * time.Second},
		{"closed by an abort of the client", sctp, []note{{fromClient, reset, false, 0}, {toClient, open, false, 0}}, Closed, 10 * time.Second},
		{"closing by a reset of the client that the backend need not have accepted", tcp, []note{{fromClient, reset, false, 0}, {toClient, open, false, 0}}, Closing, time.Hour},
		{"closing by such resets of both", tcp, []note{{fromClient, reset, false, 0}, {toClient, reset, false, 0}}, Closing, time.Hour},
		{"unanswered", udp, []note{{fromClient, open, true, 0}, {toClient, newly, true, 0}}, Unanswered, 30 * time.Second},
		{"answered", udp, []note{{fromClient, open, false, 0}, {toClient, open, false, 0}}, Answered, 120 * time.Second},
		{"answered, and on the move", udp, []note{{fromClient, open, true, 0}, {toClient, open, false, 0}}, Answered, 120 * time.Second},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t, 1024)
			f := masqueraded(flowOf(test.proto, 1))
			w.put(t, f, test.notes...)
			g, err := gather(tablesOf(w.Pinned), f)
			lab.Must(t, err)
			if have := g.state(); have != test.want || len(g.entries) != len(test.notes) {
				t.Errorf("%s by %d entries, want %s by %d", have, len(g.entries), test.want, len(test.notes))
			}

			s := w.sweeper(t)
			w.clock += uint64(test.timeout + refresh)
			w.mustSweep(t, s)
			if n := w.count(t, f); n != len(test.notes) {
				t.Errorf("%d of %d entries are left at the end of %v", n, len(test.notes), test.timeout)
			}
			w.clock++
			status := w.mustSweep(t, s)
			if n := w.count(t, f); n != 0 || status.Expired != 1 {
				t.Errorf("%d entries are left after %v, and %d flows expired, want 0 and 1", n, test.timeout, status.Expired)
			}
		})
	}
}

// A flow of which any entry is over is closed, whatever the others are. One that the backend has in
// TIME_WAIT is kept for longer, if there is room.
func TestOverAndTimeWait(t *testing.T) {
	const over, timeWait = maps.FlowOver, maps.FlowOver | maps.FlowTimeWait
	for _, test := range []struct {
		name        string
		masqueraded bool
		ending      uint8
		capacity    uint32 // of the table; four entries are in it
		timeout     time.Duration
	}{
		{"over", true, over, 1024, 10 * time.Second},
		{"over, and in TIME_WAIT", true, timeWait, 1024, 60 * time.Second},
		{"over, and in TIME_WAIT, of a client that the backend sees", false, timeWait, 1024, 10 * time.Second},
		{"over, and in TIME_WAIT, in a table that is half full", true, timeWait, 8, 60 * time.Second},
		{"over, and in TIME_WAIT, in a table that is fuller", true, timeWait, 7, 49500 * time.Millisecond}, // 57 %
		{"over, and in TIME_WAIT, in a table that is fuller still", true, timeWait, 5, 15 * time.Second},
		{"over, and in TIME_WAIT, in a full table", true, timeWait, 4, 10 * time.Second},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t, 1024)
			f := flowOf(tcp, 1)
			if test.masqueraded {
				f = masqueraded(f)
			}
			f.Ending = test.ending
			w.put(t, f, note{fromClient, maps.FlowFin, false, 0})
			f.Ending = 0
			w.put(t, f, note{toClient, maps.FlowFin, false, 0})
			s := w.sweeper(t)
			s.status.Flows = Usage{Entries: 4, Capacity: int(test.capacity)}
			w.clock += uint64(test.timeout + refresh)
			w.mustSweep(t, s)
			if n := w.count(t, f); n != 2 {
				t.Errorf("%d entries are left at the end of %v, want 2", n, test.timeout)
			}
			s.status.Flows = Usage{Entries: 4, Capacity: int(test.capacity)}
			w.clock++
			w.mustSweep(t, s)
			if n := w.count(t, f); n != 0 {
				t.Errorf("%d entries are left after %v", n, test.timeout)
			}
		})
	}
}

// Timeouts in the Config are used.
func TestTimeouts(t *testing.T) {
	w := newWorld(t, 1024)
	s, err := New(Config{Maps: w.Pinned, Now: func() uint64 { return w.clock }, Timeouts: Timeouts{
		Opening: time.Second, Established: 2 * time.Second, Closing: 3 * time.Second,
		Closed: 4 * time.Second, UDPUnanswered: 5 * time.Second, UDPAnswered: 6 * time.Second,
	}})
	lab.Must(t, err)
	flows := map[time.Duration]maps.Flow{}
	for i, n := range []note{
		{fromClient, maps.FlowNew, true, 0}, {fromClient, maps.FlowOpen, false, 0},
		{fromClient, maps.FlowFin, false, 0}, {fromClient, maps.FlowReset, false, 0},
		{fromClient, maps.FlowOpen, true, 0}, {fromClient, maps.FlowOpen, false, 0},
	} {
		f := flowOf(tcp, i+1)
		if i >= 4 {
			f.Proto = udp
		}
		flows[time.Duration(i+1)*time.Second] = f
		w.put(t, f, n)
	}
	for passed := time.Duration(0); passed <= 8*time.Second; passed += time.Second {
		for timeout, f := range flows {
			if n, lives := w.count(t, f), passed <= timeout+refresh+1; (n == 1) != lives {
				t.Errorf("after %v, a flow with a timeout of %v has %d entries", passed, timeout, n)
			}
		}
		w.clock = epoch + uint64(passed) + 1
		w.mustSweep(t, s)
	}
}

// A packet that arrives after the tables were read keeps its whole flow, whichever entry it uses, and
// even if it moves the flow to another table.
func TestSeenSince(t *testing.T) {
	f := masqueraded(flowOf(udp, 1))
	all := []note{{fromClient, 1, true, time.Hour}, {toClient, 1, true, time.Hour}, {toBackend, 1, true, time.Hour}, {fromBackend, 1, true, time.Hour}}
	packets := map[string]func(*world){
		"answered": func(w *world) {
			lab.Must(t, w.Unanswered.Delete(f.Key(fromClient)), w.Unanswered.Delete(f.Key(toClient)),
				w.Unanswered.Delete(f.Key(toBackend)), w.Unanswered.Delete(f.Key(fromBackend)))
			w.put(t, f, note{fromClient, 1, false, 0}, note{toClient, 1, false, 0}, note{toBackend, 1, false, 0}, note{fromBackend, 1, false, 0})
		},
		"not at all": func(*world) {},
	}
	for _, role := range roles {
		packets[fmt.Sprintf("by an entry of role %d", role)] = func(w *world) { w.put(t, f, note{role, 1, true, 0}) }
	}
	for name, packet := range packets {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, 1024)
			w.put(t, f, all...)
			s := w.sweeper(t)
			found, err := s.scan(s.timeouts, maps.SourceSweep{})
			lab.Must(t, err)
			packet(w)
			lab.Must(t, s.expire(found, s.timeouts))
			want := 4
			if name == "not at all" {
				want = 0
			}
			if n := w.count(t, f); n != want {
				t.Errorf("%d entries are left, want %d", n, want)
			}
		})
	}
}

// A flow that moves from one table to the other while both are read is found.
func TestSeenMoving(t *testing.T) {
	w := newWorld(t, 1024)
	f := flowOf(tcp, 1)
	reply := f.Key(toClient)
	w.put(t, f, note{toClient, 1, true, 0})
	w.SourceFilter.Note(reply, toClient, w.clock-uint64(time.Hour))
	s := w.sweeper(t)
	moves := 0
	move := func() {
		if moves++; moves == 2 { // between the two
			w.put(t, f, note{toClient, 1, false, 0})
			lab.Must(t, w.HalfOpen.Delete(reply))
		}
	}
	s.hook(true, &hooked{all: move})
	s.hook(false, &hooked{all: move})
	if w.mustSweep(t, s); !w.SourceFilter.May(reply) {
		t.Error("the flow was missed: its replies are kept out")
	}
}

// If there are more idle flows than a batch, the rest is ended soon.
func TestMoreThanOneBatch(t *testing.T) {
	w := newWorld(t, 1<<18)
	for n := range maxBatch + 1000 {
		w.put(t, flowOf(udp, n), note{fromClient, 1, false, time.Hour})
	}
	s := w.sweeper(t)
	next := func() time.Duration {
		s.took = 0 // however busy this machine is

		return s.Next()
	}
	if status := w.mustSweep(t, s); status.Expired != maxBatch || next() != emergencyInterval {
		t.Errorf("%d flows ended and %v until the next sweep, want %d and %v", status.Expired, next(), maxBatch, emergencyInterval)
	}
	if status := w.mustSweep(t, s); status.Expired != maxBatch+1000 || next() != sweepInterval {
		t.Errorf("%d flows ended and %v until the next sweep, want %d and %v", status.Expired, next(), maxBatch+1000, sweepInterval)
	}
}

// A sweep that takes long is not followed by the next at once.
func TestRest(t *testing.T) {
	s := Sweeper{took: 3 * time.Second}
	if next := s.Next(); next != time.Minute {
		t.Errorf("the next sweep is after %v, want a minute", next)
	}
}

// The source filter passes packets of a flow as long as it has an entry, however old the cell is, and keeps
// what a program writes meanwhile.
func TestSourcesOfFlows(t *testing.T) {
	const idle = time.Hour
	for _, test := range []struct {
		name   string
		put    []note
		packet bool // of another flow comes while the tables are read
		want   bool
	}{
		{name: "without a flow"},
		{name: "of a flow", put: live[:2], want: true},
		{name: "of a half-open flow", put: []note{{toClient, 0, true, 0}}, want: true},
		{name: "of an idle flow, until it is ended", put: []note{{fromClient, 1, false, idle}, {toClient, 1, false, idle}}, want: true},
		{name: "of a flow of which only the client's entry is left", put: live[:1]},
		{name: "of a flow that was put after it was looked for", packet: true, want: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t, 1024)
			f := flowOf(udp, 1)
			reply := f.Key(toClient)
			w.put(t, f, test.put...)
			w.SourceFilter.Note(reply, toClient, w.clock-uint64(time.Minute))
			s := w.sweeper(t)
			if test.packet {
				s.hook(false, &hooked{read: func() { w.SourceFilter.Note(reply, toClient, w.clock) }})
			}
			w.mustSweep(t, s)
			if have := w.SourceFilter.May(reply); have != test.want {
				t.Errorf("its packets are let through is %v, want %v", have, test.want)
			}
			w.clock += uint64(time.Minute)
			if test.name == "of an idle flow, until it is ended" {
				if w.mustSweep(t, w.sweeper(t)); w.SourceFilter.May(reply) {
					t.Error("its packets are let through after it was ended")
				}
			}
		})
	}
}

// A sweep of many flows takes little CPU time, and not much more if it ends a full batch. The limits leave
// room for a busy machine.
func TestSweepIsCheap(t *testing.T) {
	const flows = 50000
	w := newWorld(t, 1<<18)
	for n := range flows {
		w.put(t, flowOf(tcp, n), note{fromClient, 1, false, 0}, note{toClient, 1, false, 0})
	}
	s := w.sweeper(t)
	for _, test := range []struct {
		expired uint64
		limit   time.Duration
	}{{0, 500 * time.Millisecond}, {maxBatch, 2 * time.Second}} {
		begin := processTime()
		status := w.mustSweep(t, s)
		took := processTime() - begin
		t.Logf("%d flows of two entries, %d of them ended: %v", flows, test.expired, took)
		if status.Expired != test.expired || took > test.limit {
			t.Errorf("%d flows ended within %v, want %d within %v", status.Expired, took, test.expired, test.limit)
		}
		w.clock += uint64(25 * time.Hour)
	}
}

func processTime() time.Duration {
	var used unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &used)

	return time.Duration(used.Nano())
}

// The clock is that of programs, whose bpf_ktime_get_ns is CLOCK_MONOTONIC: no other clock of the kernel
// is as old as the first packet of a device may be.
func TestNow(t *testing.T) {
	var before, after unix.Timespec
	lab.Must(t, unix.ClockGettime(unix.CLOCK_MONOTONIC, &before))
	now := maps.Now()
	lab.Must(t, unix.ClockGettime(unix.CLOCK_MONOTONIC, &after))
	if now < uint64(before.Nano()) || now > uint64(after.Nano()) {
		t.Errorf("%d is not between %d and %d", now, before.Nano(), after.Nano())
	}
}

// The entries of a flow of a process of this node are at the other hooks than those of a client. They are
// listed as one flow, and expire together.
func TestFlowOfAProcess(t *testing.T) {
	w := newWorld(t, 1024)
	f := flowOf(tcp, 40000)
	f.Flags |= maps.FlowOfNode | maps.FlowResteered
	w.put(t, f, note{fromClient, maps.FlowOpen, false, 0}, note{toClient, maps.FlowOpen, false, 0})
	if from, to := f.Key(fromClient).Hook, f.Key(toClient).Hook; from != maps.HookEgress || to != maps.HookIngress {
		t.Fatalf("the entries are at hooks %d and %d", from, to)
	}
	flows, err := List(w.Pinned, "", w.clock)
	lab.Must(t, err)
	if len(flows) != 1 || flows[0].State != Established {
		t.Errorf("listed are %+v, want one established flow", flows)
	}

	s := w.sweeper(t)
	w.clock += uint64(23 * time.Hour)
	w.put(t, f, note{toClient, maps.FlowOpen, false, 0})
	w.clock += uint64(2 * time.Hour)
	w.mustSweep(t, s)
	if n := w.count(t, f); n != 2 {
		t.Errorf("%d entries are left while one is in use, want 2", n)
	}
	w.clock += uint64(24 * time.Hour)
	status := w.mustSweep(t, s)
	if n := w.count(t, f); n != 0 || status.Expired != 1 {
		t.Errorf("%d entries are left, and %d flows expired, want 0 and 1", n, status.Expired)
	}
}
