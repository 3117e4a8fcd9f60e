package reconcile

import (
	"time"

	"github.com/sluice-lb/sluice/maps"
)

// memory is how long a backend without connections that is gone is remembered.
const memory = 5 * time.Minute

// departed remembers backends that are gone, until their places are given to others. An endpoint that comes
// back gets the id that it had: the connections that live count for it, as do its health and the clients that
// stay with it. The free places of the map have all that the next agent needs to remember, too.
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
	if was := d.ids[key]; was != nil {
		delete(d.places, maps.Index(was.id))
	}
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
			} else {
				r.backendPlaces.setGeneration(place, uint8(maps.Generation(left.id))) // an adopted place has the next one
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
// endpoint is back then. Its address and the next generation stay in the map, for the next agent.
func (r *Reconciler) freeBackend(key backendKey, id uint32) {
	left, place := r.departed.leave(key, id, r.now()), maps.Index(id)
	r.afterGrace(func() error {
		if left.back {
			return nil
		}
		r.backendPlaces.give(place)
		left.freed = true

		return nil
	})
}

// adoptDeparted remembers the backend that is gone from a free place of the map. Of several places of one endpoint, that
// with connections counts.
func (r *Reconciler) adoptDeparted(place uint32, v maps.Backend) {
	key := backendKey{v.ServicePortId, endpoint{v.Addr, maps.Port(v.Port)}}
	if was := r.departed.ids[key]; was == nil || !r.backendPlaces.busy(maps.Index(was.id)) {
		r.departed.leave(key, maps.ID(place, uint32(uint8(v.Reserved-1))), r.now())
	}
}
