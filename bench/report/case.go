package report

// Case is something that is done and measured.
type Case struct {
	Name  string `json:"name"`
	Title string `json:"title"` // a sentence, without its full stop
	// Each is what there is one more of with each, for [Rate] and [CPU].
	Each string `json:"each,omitempty"`
}

// Names of cases.
const (
	Connect         = "connect"
	Arrivals        = "arrivals"
	SustainedClient = "sustained-client"
	SustainedServer = "sustained-server"
	SustainedReset  = "sustained-reset"
	FirstTCP        = "first-packet-tcp"
	FirstUDP        = "first-packet-udp"
	Exchange        = "exchange"
	Bulk            = "bulk"
	Datagrams       = "datagrams"
	UDPConnected    = "udp-connected"
	UDPUnconnected  = "udp-unconnected"
	UDPNew          = "udp-new"
	ChangeQuiet     = "change-quiet"
	ChangeChurn     = "change-churn"
	Updates         = "updates"
	Start           = "start"
	Memory          = "memory"
	Profile         = "profile"
)

// Cases are all cases, in the order of the tables.
var Cases = []Case{
	{Connect, "TCP: connect, one request, one response, close; all clients at once, each as fast as it can; latency of connect()", "connection"},
	{Arrivals, "TCP: connections at a fixed rate; latency of connect(), from the moment at which it was due", "connection"},
	{SustainedClient, "TCP: as connect, but for long, and from 128 addresses; the client closes", "connection"},
	{SustainedServer, "TCP: as connect, but for long, and from 128 addresses; the server closes", "connection"},
	{SustainedReset, "TCP: as connect, but for long, and from 128 addresses; the client resets", "connection"},
	{FirstTCP, "First packet, TCP: one connection at a time, with a pause between two; latency of connect()", "connection"},
	{FirstUDP, "First packet, UDP: one new socket at a time, with a pause between two; latency of the whole exchange", "exchange"},
	{Exchange, "TCP: requests and responses on open connections, one for each client", "exchange"},
	{Bulk, "TCP: bulk throughput of one open connection", ""},
	{Datagrams, "UDP: datagrams of 64 bytes, as many as get through", ""},
	{UDPConnected, "UDP: requests and responses on connected sockets", "exchange"},
	{UDPUnconnected, "UDP: requests and responses on unconnected sockets", "exchange"},
	{UDPNew, "UDP: a new socket for each request and response, as for DNS; latency of the whole exchange", "exchange"},
	{ChangeQuiet, "An endpoint is replaced while nothing else changes: until a client gets the new one", "change"},
	{ChangeChurn, "An endpoint is replaced while many others are: until a client gets the new one", "change"},
	{Updates, "1,000 endpoints are replaced", ""},
	{Start, "Cold start: the first start on a node", ""},
	{Memory, "Memory after a cold start", ""},
	{Profile, "Sluice's programs under the load of \"connect\": runs for each connection, and how long a run is (ns), by the kernel's statistics, which cost each run some 30 ns", ""},
}

// caseOf returns a case by its name.
func caseOf(name string) Case {
	for _, c := range Cases {
		if c.Name == name {
			return c
		}
	}

	return Case{Name: name, Title: name}
}
