package reconcile

// Written returns a number that changes whenever ids of service ports or backends
// are given to somebody, or taken away.
func (r *Reconciler) Written() uint64 {
	ports, backends := r.tables.servicePorts.writes, r.tables.backends.writes

	return ports.Puts + ports.Deletes + backends.Puts + backends.Deletes
}
