package load

import "time"

// Result is what came of a [Work]. Only what belongs to the measured window is
// counted: exchanges that began in it, or, with a rate, that were due in it.
type Result struct {
	// Started is Succeeded and Failed together.
	Started, Succeeded int

	// Failed are those without the right answer, also for having none within a
	// second; and, with a rate, those that had not begun a second after the window
	// because the clients were that far behind.
	Failed int

	// FirstError is one of the first failures, "" if there was none.
	FirstError string

	// Elapsed is the work's duration, and when clients were behind at its end, also
	// the time until the last of its exchanges began.
	Elapsed time.Duration

	// Latencies are those of the exchanges that succeeded: of the connect call for
	// [Connect], of the whole exchange otherwise. With a rate they count from the
	// moment at which the exchange was due.
	Latencies Latencies

	// Lateness is, with a rate, how long after it was due each of them began. It is
	// a part of their latencies: the time that a client was busy with those
	// before, and what the kernel takes to wake a thread.
	Lateness Latencies

	// Silence is how long nothing succeeded: slots of 100 ms, from the beginning of the
	// window, in which no exchange came to its end. Quantiles do not show that: clients of
	// a closed loop that wait make no exchange.
	Silence time.Duration

	// Machine is what all processors of the machine did during the work's duration.
	Machine CPU
}

// PerSecond is the rate of those that succeeded.
func (r *Result) PerSecond() float64 { return float64(r.Succeeded) / r.Elapsed.Seconds() }
