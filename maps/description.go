package maps

// The names of the maps, which are also those of their pins.
const (
	NameFrontendIDs  = "frontend_ids"
	NameFrontends    = "frontends"
	NamePools        = "pools"
	NameSlots        = "slots"
	NameBackends     = "backends"
	NameServicePorts = "service_ports"
	NameAddrs        = "addrs"
	NameAddrFilter   = "addr_filter"
	NameDevices      = "devices"
	NameSourceRanges = "source_ranges"
	NameServiceCIDRs = "service_cidrs"
	NameCIDRCovers   = "cidr_covers"
	NameLocalCIDRs   = "local_cidrs"
	NameOptedOut     = "opted_out"
	NameHeartbeat    = "heartbeat"
	NameAffinity     = "affinity"
	NameClaims       = "claims"
	NameSockState    = "sock_state"
	NameUDPDials     = "udp_dials"
	NameUDPPins      = "udp_pins"
	NameFlows        = "flows"
	NameHalfOpen     = "half_open"
	NameSourceFilter = "source_filter"
	NamePortFilter   = "port_filter"
	NameUnanswered   = "unanswered"
	NameEnded        = "ended"
	NameFlowUsage    = "flow_usage"
	NameFlowCounts   = "flow_counts"
	NameFragments    = "fragments"
	NameICMPBudgets  = "icmp_budgets"
	NameReasons      = "reasons"
	NameBackendLoad  = "backend_load"
	NameHealth       = "backend_health"
	NameReached      = "reached"
	NameSilences     = "silences"
	NameRefusalDebt  = "refusal_debt"
	NameTurns        = "turns"
	NamePortCounts   = "port_counts"
	NameHandshakes   = "handshakes"
	// NameBackendHandshakes is short, because a map's name in the kernel is.
	NameBackendHandshakes = "be_handshake"
	NameRefusals          = "refusals"
	NameListeners         = "listeners"
	NameMonitorRings      = "monitor_rings"
	NameRecent            = "recent"
)

// description describes a map to operators, and where it belongs.
type description struct {
	name    string
	state   bool // programs write it: it is pinned in the folder of [StateVersion]
	filter  bool // of packets, by the flows that there may be
	content string
	writers string
}

// descriptions are all maps, in the order of docs/maps.md. Folders, pins, the state that builds
// share and the tables of docs/maps.md follow from them.
var descriptions = []description{
	{name: NameFrontendIDs, content: "address, port, protocol, scope → frontend id", writers: "agent"},
	{name: NameFrontends, content: "frontend id → its key, pool id, kind", writers: "agent"},
	{name: NamePools, content: "pool id → its extent of slots, service port id, affinity, flags, algorithm", writers: "agent"},
	{name: NameSlots, content: "index → backend id; ascending within a pool, by hash in its table", writers: "agent"},
	{name: NameBackends, content: "index of a backend id → id, service port id, address, port, flags", writers: "agent"},
	{name: NameServicePorts, content: "service port id → namespace, name and port of the Service", writers: "agent"},
	{name: NameAddrs, content: "address → whether it is this node's, a Service's or that of a backend which Services have left, and whether node ports answer; the device that has it", writers: "agent"},
	{name: NameAddrFilter, content: "64 bits of a filter of the addresses in `addrs`, by a hash; those of the node have two bits", writers: "agent"},
	{name: NameDevices, content: "ifindex → source addresses of this node on the device, its bridge, whether packets may leave by it without passing the stack, and the number of its other end's network namespace; 0 → the addresses by which the node's own processes are clients", writers: "agent"},
	{name: NameSourceRanges, content: "service port id, prefix → allowed", writers: "agent"},
	{name: NameServiceCIDRs, content: "prefix → it is a ServiceCIDR, or the address of a Service that another proxy serves", writers: "agent"},
	{name: NameCIDRCovers, content: "the first 64 bits of these prefixes, a filter of `service_cidrs`", writers: "agent"},
	{name: NameLocalCIDRs, content: "prefix → it is of pods on this node (empty, unless `--detect-local-mode` requires addresses)", writers: "agent"},
	{name: NameOptedOut, content: "UID of a pod of this node, with dashes and with underscores → its sockets are left alone (empty without `--pod-opt-out`)", writers: "agent"},
	{name: NameHeartbeat, content: "when the agent last ran, in nanoseconds of the clock of programs (CLOCK_MONOTONIC)", writers: "agent"},
	{name: NameAffinity, state: true, content: "client, service port id → backend id, last used", writers: "datapath"},
	{name: NameClaims, state: true, content: "the same, of clients with unconfirmed flows", writers: "datapath"},
	{name: NameSockState, state: true, content: "connected socket → its original destination and its backend (deleted with the socket)", writers: "datapath"},
	{name: NameUDPDials, state: true, content: "unconnected socket → the same, for up to four destinations (deleted with the socket)", writers: "datapath"},
	{name: NameUDPPins, state: true, content: "socket, address, way → the other address, for more destinations; servers of the node that are asked from a Service's port", writers: "datapath"},
	{name: NameFlows, state: true, content: "tuple of a packet as it arrives at a hook → the whole flow: client, original destination, backend, masquerade", writers: "datapath; the agent deletes"},
	{name: NameHalfOpen, state: true, content: "the same, for unconfirmed connections, and those without room in `flows`", writers: "datapath; the agent deletes"},
	{name: NameUnanswered, state: true, content: "the same, for unanswered datagrams, and those without room", writers: "datapath; the agent deletes"},
	{name: NameEnded, state: true, content: "a stack of connections that have ended, which are deleted if there is no room", writers: "datapath"},
	{name: NameFlowUsage, state: true, content: "0 connections, 1 UDP → entries in `flows`", writers: "datapath; the agent repairs"},
	{name: NameSourceFilter, state: true, filter: true, content: "hash of a source address → by port, when an entry for packets with that source was put last; 0: never", writers: "datapath; the agent clears"},
	{name: NamePortFilter, state: true, filter: true, content: "ports of this node, 64 per line → 1: since the node booted it was a node port, the port of a masquerade, or that of a backend on the node", writers: "agent (node ports), datapath"},
	{name: NameFlowCounts, state: true, content: "event → how often, per CPU", writers: "datapath"},
	{name: NameFragments, state: true, content: "datagram, hook → its ports, which only its first fragment has", writers: "datapath"},
	{name: NameICMPBudgets, state: true, content: "client → the tokens that it has for ICMP errors; the unspecified address: those of all clients together", writers: "datapath"},
	{name: NameReasons, state: true, content: "reason → how often, per CPU", writers: "datapath"},
	{name: NameBackendLoad, state: true, content: "index of a backend id → live connections: sockets, flows of devices", writers: "datapath; the agent repairs"},
	{name: NameHealth, state: true, content: "index of a backend id → when it last answered, what speaks against it since, until when it is passed over", writers: "datapath"},
	{name: NameReached, state: true, content: "hash of a client and a service port → when the one last reached the other", writers: "datapath"},
	{name: NameSilences, state: true, content: "hash of a service port → how many exchanges of datagrams usually begin before one is answered", writers: "datapath"},
	{name: NameRefusalDebt, state: true, content: "hash of a service port → how many connections have to come until more refusals are hidden from clients", writers: "datapath"},
	{name: NameTurns, state: true, content: "hash of a frontend → number of the next flow (algorithm `rr`)", writers: "datapath"},
	{name: NamePortCounts, state: true, content: "index of a service port id → connections, bytes, hidden refusals, per CPU", writers: "datapath; the agent clears"},
	{name: NameHandshakes, state: true, content: "index of a service port id → TCP handshakes of sockets by duration, retransmissions (empty with `--handshake-metrics=false`)", writers: "datapath; the agent clears"},
	{name: NameBackendHandshakes, state: true, content: "index of a backend id → the same, without buckets (empty without `--backend-metrics`)", writers: "datapath; the agent clears"},
	{name: NameRefusals, state: true, content: "service port id, reason → how many new flows got no backend; id 0 has those for whose service port there is no room", writers: "datapath; the agent deletes"},
	{name: NameListeners, state: true, content: "of each `sluice monitor` that runs: until when it listens, unless it goes on; how many events it has lost", writers: "`sluice monitor`; datapath (lost)"},
	{name: NameMonitorRings, state: true, content: "place in `listeners` → the ring buffer of that `sluice monitor`", writers: "`sluice monitor`; datapath (the ring)"},
	{name: NameRecent, state: true, content: "reason → the last 64 refusals", writers: "datapath"},
}

// namesOf returns the names of the maps that match.
func namesOf(match func(description) bool) []string {
	var names []string
	for _, d := range descriptions {
		if match(d) {
			names = append(names, d.name)
		}
	}

	return names
}

// stateNames are the maps that programs write, and filterNames those of them that filter packets.
var (
	stateNames  = namesOf(func(d description) bool { return d.state })
	filterNames = namesOf(func(d description) bool { return d.filter })
)
