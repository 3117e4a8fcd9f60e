package reconcile

import "container/heap"

// queue holds the Services that have something to do, by when. A Service is in
// it at most once, at the earliest moment it was added with.
type queue struct {
	heap scheduled
	turn uint64
}

// place is a Service's own note of where it is in the queue.
type place struct {
	at    instant
	turn  uint64 // among Services of the same moment: first come, first served
	index int    // in the heap, plus one; zero: not queued
}

// add queues svc for at, unless it is queued for an earlier moment.
func (q *queue) add(svc *service, at instant) {
	if svc.place.index != 0 && svc.place.at <= at {
		return
	}
	q.turn++
	svc.place.at, svc.place.turn = at, q.turn
	if svc.place.index != 0 {
		heap.Fix(&q.heap, svc.place.index-1)

		return
	}
	heap.Push(&q.heap, svc)
}

// first returns the moment of the first Service, or never.
func (q *queue) first() instant {
	if len(q.heap) == 0 {
		return never
	}

	return q.heap[0].place.at
}

// empty says whether no Service is due.
func (q *queue) empty(now instant) bool { return q.first() > now }

// pop takes the first Service out, or returns nil if none is due.
func (q *queue) pop(now instant) *service {
	if q.empty(now) {
		return nil
	}

	return heap.Pop(&q.heap).(*service)
}

// scheduled implements [heap.Interface].
type scheduled []*service

func (s scheduled) Len() int { return len(s) }

func (s scheduled) Less(i, j int) bool {
	a, b := &s[i].place, &s[j].place
	if a.at != b.at {
		return a.at < b.at
	}

	return a.turn < b.turn
}

func (s scheduled) Swap(i, j int) {
	s[i], s[j] = s[j], s[i]
	s[i].place.index, s[j].place.index = i+1, j+1
}

// Push implements [heap.Interface].
func (s *scheduled) Push(x any) {
	svc := x.(*service)
	*s = append(*s, svc)
	svc.place.index = len(*s)
}

// Pop implements [heap.Interface].
func (s *scheduled) Pop() any {
	old := *s
	svc := old[len(old)-1]
	old[len(old)-1] = nil
	*s = old[:len(old)-1]
	svc.place.index = 0

	return svc
}
