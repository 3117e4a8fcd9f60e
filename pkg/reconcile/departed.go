package reconcile

import (
	"time"

	"github.com/sluice-lb/sluice/maps"
)

// memory is how long a backend without connections that is gone is remembered.
const memory = 5 * time.Minute

// departed remembers backends that are gone, until their places are given to others. An endpoint that comes
// back gets the id that it had: the connections that live count for it, as do its health and the clients that
// stay with it.
type departed struct {
	ids    map[backendKey]*departure
	places map[uint32]backendKey
}

// backendKey is one endpoint of a service port.
type backendKey struct {
	port uint32 // id
	endpoint
}

// departure is a backend that is gone.
type departure struct {
	id    uint32
	at    time.Time
	freed bool // its place is free; else that waits for a grace period
	back  bool
}

func newDeparted() departed {
	return departed{make(map[backendKey]*departure), make(map[uint32]backendKey)}
}

// leave records that a backend is gone.
func (d departed) leave(key backendKey, id uint32, now time.Time) *departure {
	left := &departure{id: id, at: now}
	d.ids[key], d.places[maps.Index(id)] = left, key

	return left
}

// forget forgets whose a place was.
func (d departed) forget(place uint32) {
	if key, known := d.places[place]; known {
		delete(d.ids, key)
		delete(d.places, place)
	}
}

// takeBackend allocates the place of a backend that is not in the maps, and returns its id: that which the
// endpoint had, or else one that no program remembers.
func (r *Reconciler) takeBackend(key backendKey) (id uint32, err error) {
	if left := r.departed.ids[key]; left != nil {
		place := maps.Index(left.id)
		r.departed.forget(place)
		if r.now().Sub(left.at) < memory || r.backendPlaces.busy(place) {
			left.back = true
			if left.freed {
				r.backendPlaces.reclaim(left.id)
			}

			return left.id, nil
		}
	}
	place, err := r.backendPlaces.take()
	if err != nil {
		return 0, err
	}
	r.departed.forget(place)
	if err := r.backendPlaces.note(r.loads.Begin(place)); err != nil {
		r.backendPlaces.untake(place)

		return 0, err
	}

	return r.backendPlaces.id(place), nil
}

// freeBackend frees the place of a backend whose id is not in the maps, after a grace period and unless the
// endpoint is back then. The generation stays in the map, for the next agent.
func (r *Reconciler) freeBackend(key backendKey, id uint32) {
	left, place := r.departed.leave(key, id, r.now()), maps.Index(id)
	r.afterGrace(func() error {
		if left.back {
			return nil
		}
		if err := r.backends.put(place, maps.Backend{Reserved: uint16(r.backendPlaces.generation(place)) + 1}); err != nil {
			return err
		}
		r.backendPlaces.give(place)
		left.freed = true

		return nil
	})
}
