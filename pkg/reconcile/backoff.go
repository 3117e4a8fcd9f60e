package reconcile

import "time"

// Failed writes are tried again after firstRetry, then after twice as long
// each time, up to lastRetry.
const (
	firstRetry = time.Second
	lastRetry  = time.Minute
)

// instant is a moment, as time since the Reconciler was made: unlike the
// wall clock's it never jumps, and unlike a [time.Time] it has eight bytes.
// Zero is long ago.
type instant time.Duration

// never is later than every moment.
const never = instant(1<<63 - 1)

func earlier(a, b instant) instant { return min(a, b) }

func (i instant) add(d time.Duration) instant { return i + instant(d) }

// clock tells instants.
type clock struct {
	read  func() time.Time
	start time.Time
}

// newClock starts one nanosecond ago, so that now is never the zero instant.
func newClock(read func() time.Time) clock {
	return clock{read: read, start: read().Add(-1)}
}

func (c clock) now() instant { return c.instant(c.read()) }

func (c clock) instant(t time.Time) instant { return instant(t.Sub(c.start)) }

func (c clock) time(i instant) time.Time { return c.start.Add(time.Duration(i)) }

// backoff says when to try again. Its zero value says: now.
type backoff struct {
	at    instant
	delay time.Duration
}

func (b *backoff) ready(now instant) bool { return now >= b.at }

func (b *backoff) fail(now instant) {
	b.delay = min(max(2*b.delay, firstRetry), lastRetry)
	b.at = now.add(b.delay)
}
