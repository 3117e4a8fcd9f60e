package reconcile

import (
	"container/heap"
	"time"

	"github.com/sluice-lb/sluice/pkg/queue"
)

// waiting are the Services that wait for their backoff to end, as a heap: the first one is that which waits the shortest.
type waiting []*service

// add makes a Service wait for its backoff, which must have changed.
func (w *waiting) add(svc *service) {
	if svc.place > 0 {
		heap.Fix(w, svc.place-1)
	} else {
		heap.Push(w, svc)
	}
}

// remove makes a Service wait no more.
func (w *waiting) remove(svc *service) {
	if svc.place > 0 {
		heap.Remove(w, svc.place-1)
	}
}

// over removes the Services whose backoff is over, and returns them.
func (w *waiting) over(now time.Time) []*service {
	var over []*service
	for len(*w) > 0 && (*w)[0].retry.isOver(now) {
		over = append(over, heap.Pop(w).(*service))
	}

	return over
}

// Len is for package heap, as are the following.
func (w *waiting) Len() int { return len(*w) }

func (w *waiting) Less(i, j int) bool { return (*w)[i].retry.at.Before((*w)[j].retry.at) }

func (w *waiting) Swap(i, j int) {
	all := *w
	all[i], all[j] = all[j], all[i]
	all[i].place, all[j].place = i+1, j+1
}

func (w *waiting) Push(svc any) {
	*w = append(*w, svc.(*service))
	(*w)[len(*w)-1].place = len(*w)
}

func (w *waiting) Pop() any {
	last := len(*w) - 1
	svc := (*w)[last]
	(*w)[last], *w = nil, (*w)[:last]
	svc.place = 0

	return svc
}

// roomPause is the least time between two rounds in which Services are tried again for which there was no room: a large one
// takes many slices, and as a rule it is refused again.
const roomPause = time.Second

// blocked are the Services for which there was no room. They also wait for their backoff.
type blocked struct {
	turns queue.Turns[*service] // by namespace; some do not lack room any more
	count int                   // of those that do
	tried time.Time             // when Services were tried last, because there was room
}

// add records that there was no room for a Service.
func (b *blocked) add(svc *service) {
	if svc.lacksRoom {
		return
	}
	svc.lacksRoom = true
	b.count++
	if !svc.hasTurn {
		svc.hasTurn = true
		b.turns.Add(svc.name.Namespace, svc)
	}
}

// remove records that a Service does not lack room, or is about to be tried.
func (b *blocked) remove(svc *service) {
	if svc.lacksRoom {
		svc.lacksRoom = false
		b.count--
	}
}

// next removes some of the Services and returns them, one of each namespace after the other.
func (b *blocked) next(most int) []*service {
	var next []*service
	for len(next) < most {
		svc, ok := b.turns.Next()
		if !ok {
			break
		}
		svc.hasTurn = false
		if svc.lacksRoom {
			b.remove(svc)
			next = append(next, svc)
		}
	}

	return next
}
