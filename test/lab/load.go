package lab

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Load is exchanges at a steady rate: each starts when its time has come,
// also if those before it have not ended.
type Load struct {
	Exchange               // what to do each time
	Rate     int           // how often per second
	Duration time.Duration // how long; 0 means until stopped

	// Keep makes the exchanges share that many connections, which stay open and
	// take turns, instead of opening one each. One that fails is opened again
	// when its turn comes.
	Keep int `json:",omitempty"`
}

// LoadReport is the result of a [Load].
type LoadReport struct {
	Started   int
	Succeeded int
	Failures  []LoadFailure
	Answers   map[string]int // how often each server answered, by name
	Longest   time.Duration  // of those that succeeded
}

// LoadFailure is one exchange that failed.
type LoadFailure struct {
	Start   time.Time
	Latency time.Duration
	Call    string // the system call that failed
	Errno   unix.Errno
	Text    string // where there is no errno
}

func (f LoadFailure) String() string {
	text := f.Text
	if f.Errno != 0 {
		text = fmt.Sprintf("%s: %v", f.Call, f.Errno)
	}

	return fmt.Sprintf("%s after %v: %s", f.Start.Format("15:04:05.000"), f.Latency.Round(time.Microsecond), text)
}

// loadRun is a load under way.
type loadRun struct {
	load Load
	stop chan struct{}
	done chan struct{}
	kept []keptConnection

	mu     sync.Mutex
	report LoadReport
}

// keptConnection is one that the exchanges share.
type keptConnection struct {
	mu   sync.Mutex
	conn *rawSocket // nil: to be opened
}

func startLoad(load Load) *loadRun {
	run := &loadRun{
		load:   load,
		stop:   make(chan struct{}),
		done:   make(chan struct{}),
		kept:   make([]keptConnection, load.Keep),
		report: LoadReport{Answers: make(map[string]int)},
	}
	go run.run()

	return run
}

// run starts every exchange in time and waits for the last.
func (r *loadRun) run() {
	defer close(r.done)

	var exchanges sync.WaitGroup
	start := time.Now()
	for turn := 0; ; turn++ {
		at := time.Duration(turn) * time.Second / time.Duration(max(r.load.Rate, 1))
		if r.load.Duration > 0 && at >= r.load.Duration {
			break
		}
		if r.stoppedBefore(start.Add(at)) {
			break
		}
		exchanges.Go(func() { r.exchange(turn) })
	}
	exchanges.Wait()
	for i := range r.kept {
		if conn := r.kept[i].conn; conn != nil {
			_ = conn.close() // its answers are counted
		}
	}
}

// stoppedBefore waits for a time. It is true if the load is stopped meanwhile.
func (r *loadRun) stoppedBefore(at time.Time) bool {
	select {
	case <-r.stop:
		return true
	case <-time.After(time.Until(at)):
		return false
	}
}

func (r *loadRun) exchange(turn int) {
	start := time.Now()
	var reply Reply
	var err error
	if len(r.kept) == 0 {
		reply, err = r.load.run()
	} else {
		reply, err = r.kept[turn%len(r.kept)].run(&r.load.Exchange)
	}
	r.count(start, reply, err)
}

// run does an exchange on the connection, which it opens if need be.
func (k *keptConnection) run(x *Exchange) (reply Reply, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()

	start := time.Now()
	defer func() { reply.Latency = time.Since(start) }()
	if k.conn == nil {
		k.conn, err = x.open(&reply)
	}
	if err == nil {
		err = x.ask(k.conn, &reply)
	}
	if err != nil && k.conn != nil {
		err = errors.Join(err, k.conn.close())
		k.conn = nil
	}

	return reply, err
}

func (r *loadRun) count(start time.Time, reply Reply, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()

	r.report.Started++
	if failed := failureOf(err); failed != nil {
		r.report.Failures = append(r.report.Failures, LoadFailure{
			Start:   start,
			Latency: reply.Latency,
			Call:    failed.Call,
			Errno:   failed.Errno,
			Text:    failed.Text,
		})
		return
	}
	r.report.Succeeded++
	r.report.Longest = max(r.report.Longest, reply.Latency)
	if answer, err := ParseAnswer(reply.Text); err == nil {
		r.report.Answers[answer.Name]++
	}
}

// RunningLoad is a [Load] in a [Caller]'s process.
type RunningLoad struct {
	caller *Caller
	number int
}

// StartLoad starts a load and returns at once.
func (c *Caller) StartLoad(load Load) (*RunningLoad, error) {
	answer, err := c.call(call{Act: actStartLoad, Load: &load})
	if err != nil {
		return nil, err
	}

	return &RunningLoad{caller: c, number: answer.Socket}, nil
}

// Wait waits until the load's duration is over and returns its result.
func (l *RunningLoad) Wait() (LoadReport, error) { return l.end(actAwaitLoad) }

// Stop stops the load, lets the exchanges under way finish, and returns
// the result.
func (l *RunningLoad) Stop() (LoadReport, error) { return l.end(actStopLoad) }

func (l *RunningLoad) end(act act) (LoadReport, error) {
	answer, err := l.caller.call(call{Act: act, Socket: l.number})
	if err != nil {
		return LoadReport{}, err
	}

	return *answer.Report, nil
}

func (c *callee) startLoad(load Load) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	number := c.number()
	c.loads[number] = startLoad(load)

	return number
}

// endLoad waits for a load, or stops it, and forgets it.
func (c *callee) endLoad(number int, stop bool) (*LoadReport, error) {
	c.mu.Lock()
	run, ok := c.loads[number]
	delete(c.loads, number)
	c.mu.Unlock()
	if !ok {
		return nil, fmt.Errorf("no load %d", number)
	}
	if stop {
		close(run.stop)
	}
	<-run.done

	return &run.report, nil
}
