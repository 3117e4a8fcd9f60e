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

// lack is a set of maps without room: a bit for each of Reconciler.rooms.
type lack uint16

// refusedBy returns which maps have had no room since the Service that is at work began.
func refusedBy(rooms []*room) (l lack) {
	for i, room := range rooms {
		if room.refused {
			l |= 1 << i
		}
	}

	return l
}

// blocked are the Services for which there was no room. They also wait for their backoff.
type blocked struct {
	turns map[lack]*queue.Turns[*service] // by what they lack, then by namespace
	tried time.Time                       // when Services were tried last, because there was room
}

// count returns how many there are.
func (b *blocked) count() (n int) {
	for _, turns := range b.turns {
		n += turns.Len()
	}

	return n
}

// add records that there was no room for a Service, if that is why it has failed.
func (b *blocked) add(svc *service) {
	if svc.lacks == svc.refused {
		return
	}
	b.remove(svc)
	if svc.lacks = svc.refused; svc.lacks == 0 {
		return
	}
	if b.turns[svc.lacks] == nil {
		if b.turns == nil {
			b.turns = make(map[lack]*queue.Turns[*service])
		}
		b.turns[svc.lacks] = &queue.Turns[*service]{}
	}
	b.turns[svc.lacks].Add(svc.name.Namespace, svc)
}

// remove records that a Service does not lack room.
func (b *blocked) remove(svc *service) {
	if svc.lacks != 0 {
		b.turns[svc.lacks].Remove(svc.name.Namespace, svc)
		svc.lacks = 0
	}
}

// haveRoom reports whether a map has room that a Service lacks.
func (b *blocked) haveRoom(rooms []*room) bool {
	for lacks, turns := range b.turns {
		for i, room := range rooms {
			if turns.Len() > 0 && lacks&(1<<i) != 0 && room.freed > 0 {
				return true
			}
		}
	}

	return false
}

// next removes as many Services that lack a map as entries of it were freed, and returns them: of those that lack the same
// maps, one of each namespace after the other.
func (b *blocked) next(rooms []*room) []*service {
	var next []*service
	used := make([]int, len(rooms))
	for lacks, turns := range b.turns {
		for i, room := range rooms {
			for lacks&(1<<i) != 0 && used[i] < room.freed {
				svc, ok := turns.Next()
				if !ok {
					break
				}
				svc.lacks = 0
				used[i]++
				next = append(next, svc)
			}
		}
	}

	return next
}
