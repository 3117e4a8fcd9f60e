package load

import (
	"encoding/gob"
	"encoding/json"
	"fmt"
	"io"
	"sync"
	"time"
)

// generate is the load generator's process: it reads its [Work], does it, and
// writes its [Result].
func generate(stdin io.Reader, stdout io.Writer) error {
	var work Work
	if err := json.NewDecoder(stdin).Decode(&work); err != nil {
		return fmt.Errorf("read work: %w", err)
	}
	go exitAtEnd()
	result, err := work.do()
	if err != nil {
		return err
	}

	return gob.NewEncoder(stdout).Encode(result)
}

// generatorThreads are the clients, the one that waits for the window's end, and the
// one that reads stdin.
func generatorThreads(clients int) int { return clients + 2 }

// window is the time in which exchanges are counted.
type window struct {
	start    time.Duration // of the first exchange, on the clock of [now]
	from, to time.Duration
}

// now is the time since the process started, on a clock that only goes forward.
func now() time.Duration { return time.Since(processStart) }

var processStart = time.Now()

// The clients have this long to become ready for the first exchange.
const makeReady = 20 * time.Millisecond

func (w *Work) do() (*Result, error) {
	var clients []*client
	for number := range w.Clients {
		clients = append(clients, newClient(w, number))
	}
	start := now() + makeReady
	window := window{start: start, from: start + w.WarmUp, to: start + w.WarmUp + w.Duration}
	var running sync.WaitGroup
	for _, c := range clients {
		running.Go(func() { c.run(window) })
	}
	machine, err := readCPUOver(window)
	running.Wait()
	if err != nil {
		return nil, err
	}
	result := resultOf(clients, window)
	result.Machine = machine

	return result, nil
}

// readCPUOver returns, at the window's end, what the machine did in it.
func readCPUOver(window window) (CPU, error) {
	pause(window.from - now())
	before, err := ReadCPU()
	if err != nil {
		return CPU{}, err
	}
	pause(window.to - now())
	after, err := ReadCPU()

	return after.Sub(before), err
}

// resultOf adds up what the clients counted.
func resultOf(clients []*client, window window) *Result {
	r := &Result{}
	var latencies, lateness []*samples
	last := window.to
	busy := make([]bool, slotsOf(window.to-window.from))
	for _, c := range clients {
		r.Succeeded += c.succeeded
		r.Failed += c.failed
		if r.FirstError == "" {
			r.FirstError = c.first.text()
		}
		last = max(last, c.last)
		for i, succeeded := range c.slots {
			busy[i] = busy[i] || succeeded
		}
		latencies = append(latencies, &c.latencies)
		lateness = append(lateness, &c.lateness)
	}
	for _, succeeded := range busy {
		if !succeeded {
			r.Silence += slotLength
		}
	}
	r.Started = r.Succeeded + r.Failed
	r.Elapsed = last - window.from
	r.Latencies, r.Lateness = sorted(latencies), sorted(lateness)

	return r
}
