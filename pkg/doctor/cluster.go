package doctor

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/node"
	"github.com/sluice-lb/sluice/pkg/status"
)

// APIServer is what the API server answered.
type APIServer struct {
	URL    string
	Status int // of HTTP
	// ServiceIPs are the ClusterIPs of the Service `kubernetes`, if it may be listed.
	ServiceIPs []string
	// ServiceCIDRs and PodCIDRs are those of the cluster, if they may be listed. CIDRStatus is what HTTP
	// says to the former: 404 before Kubernetes 1.33.
	ServiceCIDRs []netip.Prefix
	CIDRStatus   int
	PodCIDRs     []PodCIDR
	// SelfStatus is what HTTP says to the Node object of this node, 0 if it was not asked for; SelfIPs are its addresses,
	// one of a family, and SelfPodCIDRs its ranges.
	SelfStatus   int
	SelfIPs      []netip.Addr
	SelfPodCIDRs []netip.Prefix
	// Skew is how far the clock of the API server is ahead of this node's.
	Skew time.Duration
}

// PodCIDR is a range of pod addresses of a node.
type PodCIDR struct {
	Node   string
	Prefix netip.Prefix
}

// errNotConfigured is why no API server was asked, and giveAPIServer what to do.
var errNotConfigured = errors.New("no API server is configured")

const giveAPIServer = "Give --kubeconfig, or --config with kube-proxy's configuration, as for sluice agent."

func checkAPIServer(n Node) []Finding {
	api, err := n.APIServer.Value, n.APIServer.Err
	switch {
	case errors.Is(err, errNotConfigured):
		return warning("not looked at: "+err.Error(), giveAPIServer)
	case err != nil && api.URL == "":
		return problem(err.Error(), "Correct the kubeconfig, or give another one.")
	case err != nil:
		remedy := "Make sure that the address is that of an API server or a load balancer before it, and that this node can reach it without any Service."
		if errors.As(err, new(*tls.CertificateVerificationError)) {
			remedy = "Compare the kubeconfig's server and certificate-authority with those of the API server, and this node's clock."
		}

		return problem(fmt.Sprintf("%s: %s", api.URL, explain(err)), remedy)
	case api.Status == 401:
		return problem(api.URL+" does not know this client (401 Unauthorized)", "Renew the token or the certificate in the kubeconfig.")
	case api.Status >= 500:
		return problem(fmt.Sprintf("%s answers with status %d", api.URL, api.Status), "Look at the log of the API server.")
	}
	host := api.URL
	if parsed, err := url.Parse(api.URL); err == nil {
		host = parsed.Hostname()
	}
	if slices.Contains(api.ServiceIPs, host) || strings.HasSuffix(host, ".svc") || strings.Contains(host, ".svc.") {
		return warning(api.URL+" is the Service `kubernetes`, which the agent itself programs",
			"Give the agent the address of an API server or of a load balancer before it, by the kubeconfig or --master: after a boot there is no Service yet.")
	}

	return ok("%s answers", api.URL)
}

// checkServiceCIDRs finds hosts and pods with addresses in a ServiceCIDR, which no client can reach, and pods whose routes
// lead a ServiceCIDR elsewhere, which count only after translation.
func checkServiceCIDRs(n Node) []Finding {
	switch {
	case errors.Is(n.APIServer.Err, errNotConfigured):
		return warning("not compared: "+n.APIServer.Err.Error(), giveAPIServer)
	case n.APIServer.Err != nil:
		return warning("not compared: the API server does not answer", "Mend what the check api-server reports.")
	case n.APIServer.Value.CIDRStatus != http.StatusOK && n.APIServer.Value.CIDRStatus != http.StatusNotFound:
		return warning(fmt.Sprintf("not compared: this client may not list ServiceCIDRs (status %d)", n.APIServer.Value.CIDRStatus),
			"Give the kubeconfig of the agent, which may.")
	case len(n.APIServer.Value.ServiceCIDRs) == 0:
		return ok("the API server lists no ServiceCIDR, so no address is dropped")
	}
	var inside, led []string
	for _, cidr := range n.APIServer.Value.ServiceCIDRs {
		for _, r := range n.Routes.Value {
			if cidr.Contains(r.To.Addr()) && r.To.Bits() >= cidr.Bits() {
				inside = append(inside, fmt.Sprintf("route %s by %s is in %s", r.To, cmp.Or(r.Device, "no device"), cidr))
			}
		}
		for _, p := range n.APIServer.Value.PodCIDRs {
			if cidr.Overlaps(p.Prefix) {
				inside = append(inside, fmt.Sprintf("podCIDR %s of node %s overlaps %s", p.Prefix, p.Node, cidr))
			}
		}
		for _, ns := range n.Namespaces.Value {
			for _, r := range ns.Routes {
				if r.To.Bits() > 0 && r.To.Overlaps(cidr) && !isDefaultDevice(ns.Routes, r) {
					led = append(led, fmt.Sprintf("%s leads %s by %s", ns, r.To, cmp.Or(r.Device, "no device")))
				}
			}
		}
	}
	var found []Finding
	if len(inside) > 0 {
		found = append(found, warning("hosts or pods may have addresses of a ServiceCIDR: "+status.ListText(inside),
			"What no Service has there is dropped: give them other addresses, or the cluster another ServiceCIDR.")...)
	}
	if len(led) > 0 {
		found = append(found, warning("routes of pods lead addresses of Services elsewhere: "+status.ListText(led),
			"Sockets are translated before these routes count; opt such pods out if the addresses there are others' (a VPN, a second network).")...)
	}
	if len(found) > 0 {
		return found
	}

	return ok("no route and no podCIDR is in a ServiceCIDR")
}

// isDefaultDevice reports whether a route leaves by the device of a default route of its family.
func isDefaultDevice(routes []node.Route, r node.Route) bool {
	return slices.ContainsFunc(routes, func(d node.Route) bool {
		return d.To.Bits() == 0 && d.Device == r.Device && d.To.Addr().Is4() == r.To.Addr().Is4()
	})
}

// explain names errors of certificates, and returns the text of others.
func explain(err error) string {
	var invalid x509.CertificateInvalidError
	var unknown x509.UnknownAuthorityError
	var name x509.HostnameError
	switch {
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return fmt.Sprintf("its certificate is valid from %s to %s, and this node's clock shows another time",
			invalid.Cert.NotBefore.Format(time.RFC3339), invalid.Cert.NotAfter.Format(time.RFC3339))
	case errors.As(err, &unknown):
		return "its certificate is signed by an authority that the kubeconfig does not have"
	case errors.As(err, &name):
		names := slices.Clone(name.Certificate.DNSNames)
		for _, ip := range name.Certificate.IPAddresses {
			names = append(names, ip.String())
		}

		return fmt.Sprintf("its certificate is for other names than %s: %s", name.Host, status.ListText(names))
	}

	return err.Error()
}

// Differences of clocks that matter: beyond the first, times in logs and Events mislead; beyond the
// second, certificates and tokens are refused when they are new.
const (
	unusualSkew = 5 * time.Second
	harmfulSkew = time.Minute
)

func checkClock(n Node) []Finding {
	switch {
	case errors.Is(n.APIServer.Err, errNotConfigured):
		return warning("not compared: "+n.APIServer.Err.Error(), giveAPIServer)
	case n.APIServer.Err != nil:
		return warning("not compared: the API server does not answer", "Mend what the check api-server reports.")
	}
	skew := n.APIServer.Value.Skew.Round(time.Second)
	seen := fmt.Sprintf("this node's clock is %v behind the API server's", skew)
	if skew < 0 {
		seen = fmt.Sprintf("this node's clock is %v ahead of the API server's", -skew)
	}
	const remedy = "Let a time service (chrony, systemd-timesyncd) set the clocks."
	switch {
	case skew.Abs() >= harmfulSkew:
		return problem(seen, remedy)
	case skew.Abs() >= unusualSkew:
		return warning(seen, remedy)
	}

	return ok("this node's clock agrees with the API server's")
}

// checkConfiguration finds what the configuration names and does not exist: the agent's own problems if one runs, or else
// those that it would have.
func checkConfiguration(n Node) []Finding {
	problems := n.Agent.Value.OfNode()
	if n.Agent.Err != nil {
		cfg, api := n.Config.Model, n.APIServer.Value
		cfg.NodeOptional = api.SelfStatus != http.StatusNotFound
		model := node.NewModel(cfg)
		model.SetState(n.State.Value)
		if api.SelfStatus == http.StatusOK {
			model.SetObject(api.SelfIPs, api.SelfPodCIDRs, true)
		}
		model.ObjectReceived()
		model.StopWaiting()
		problems, _ = model.NewUnmet()
	}
	var found []Finding
	for _, p := range problems {
		remedy := p.Remedy
		p.Remedy = ""
		found = append(found, Finding{State: Problem, Seen: p.String(), Remedy: cmp.Or(remedy, "Correct it") + "."})
	}
	if len(found) > 0 {
		return found
	}

	if name := n.Config.Model.NodeName; n.Agent.Err != nil && name != "" && n.APIServer.Value.SelfStatus != http.StatusOK {
		why, remedy := fmt.Sprintf("this client may not read it (status %d)", n.APIServer.Value.SelfStatus), "Give the kubeconfig of the agent, which may."
		switch {
		case errors.Is(n.APIServer.Err, errNotConfigured):
			why, remedy = n.APIServer.Err.Error(), giveAPIServer
		case n.APIServer.Err != nil:
			why, remedy = "the API server does not answer", "Mend what the check api-server reports."
		}

		return warning(fmt.Sprintf("what the agent's configuration names on this node is there; not compared with the Node %s: %s", name, why), remedy)
	}

	return ok("what the agent's configuration names is there")
}

func checkAgent(n Node) []Finding {
	switch s, err := n.Agent.Value, n.Agent.Err; {
	case errors.Is(err, status.ErrNotRunning) && n.Pins.Err == nil && len(n.Pins.Value.Folders) > 0:
		return problem(status.WithoutAgent(n.Pins.Value.LastRan, time.Now())+": what is programmed stays in force, and changes are not followed",
			"Start the agent, or remove what it left: sluice cleanup on the node, deploy/cleanup on all nodes.")
	case errors.Is(err, status.ErrNotRunning):
		return ok("no agent runs, and nothing is programmed")
	case errors.Is(err, status.ErrHung):
		return problem(err.Error()+": what is programmed stays in force, and changes are not followed",
			"Look at its log, and whether it gets CPU time; the kubelet restarts it when /livez has failed for long enough.")
	case err != nil:
		return unseen(err)
	case s.Well():
		return append(ok("agent %s runs and is well", s.Version), leftOut(s)...)
	default:
		troubles := s.TroublesBeside()
		if !s.Synced {
			troubles = slices.Insert(troubles, 0, "it waits for the first complete list of Services")
		}
		if len(troubles) == 0 {
			return append(ok("agent %s runs; what is not well is what the check configuration reports", s.Version), leftOut(s)...)
		}

		return append(problem("agent "+s.Version+" runs, and is not well: "+status.ListText(troubles), "Look at sluice status and the log of the agent."), leftOut(s)...)
	}
}

// leftOut returns a warning of what the agent has left out of objects, if there is anything.
func leftOut(s status.Status) []Finding {
	var texts []string
	for _, p := range s.Problems {
		if p.Effect == lb.LeftOut {
			texts = append(texts, p.String())
		}
	}
	if len(texts) == 0 {
		return nil
	}

	return warning("parts of objects are left out: "+status.ListText(texts), "Correct the objects; Events of them name the same fields.")
}
