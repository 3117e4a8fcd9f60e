package lb

import "fmt"

var protocolText = map[Protocol]string{
	AnyProtocol: "any",
	TCP:         "TCP",
	UDP:         "UDP",
	SCTP:        "SCTP",
}

var scopeText = map[Scope]string{
	Internal: "internal",
	External: "external",
}

var kindText = map[Kind]string{
	KindClusterIP:    "ClusterIP",
	KindExternalIP:   "ExternalIP",
	KindLoadBalancer: "LoadBalancer",
	KindNodePort:     "NodePort",
}

var useText = map[Use]string{
	Used:       "used",
	NotReady:   "not ready",
	NotServing: "terminating and not serving",
	Superseded: "terminating, others are ready",
	OtherZone:  "other zone (topology hints)",
	OtherNode:  "other node (topology hints)",
	NotLocal:   "other node (traffic policy Local)",
	NoFrontend: "no frontend leads to it",
}

var serviceTypeText = map[ServiceType]string{
	ClusterIP:    "ClusterIP",
	NodePort:     "NodePort",
	LoadBalancer: "LoadBalancer",
	ExternalName: "ExternalName",
}

var trafficPolicyText = map[TrafficPolicy]string{
	Cluster: "Cluster",
	Local:   "Local",
}

var familyText = map[Family]string{
	IPv4: "IPv4",
	IPv6: "IPv6",
}

func (p Protocol) String() string      { return format(protocolText, p) }
func (s Scope) String() string         { return format(scopeText, s) }
func (k Kind) String() string          { return format(kindText, k) }
func (u Use) String() string           { return format(useText, u) }
func (t ServiceType) String() string   { return format(serviceTypeText, t) }
func (p TrafficPolicy) String() string { return format(trafficPolicyText, p) }
func (f Family) String() string        { return format(familyText, f) }

// MarshalText implements [encoding.TextMarshaler].
func (p Protocol) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// MarshalText implements [encoding.TextMarshaler].
func (s Scope) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// MarshalText implements [encoding.TextMarshaler].
func (k Kind) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// MarshalText implements [encoding.TextMarshaler].
func (u Use) MarshalText() ([]byte, error) { return []byte(u.String()), nil }

// UnmarshalText implements [encoding.TextUnmarshaler].
func (p *Protocol) UnmarshalText(text []byte) error { return parse(protocolText, p, text) }

// UnmarshalText implements [encoding.TextUnmarshaler].
func (s *Scope) UnmarshalText(text []byte) error { return parse(scopeText, s, text) }

// UnmarshalText implements [encoding.TextUnmarshaler].
func (k *Kind) UnmarshalText(text []byte) error { return parse(kindText, k, text) }

// UnmarshalText implements [encoding.TextUnmarshaler].
func (u *Use) UnmarshalText(text []byte) error { return parse(useText, u, text) }

// format returns the text of v, or its number if it has none.
func format[E ~uint8](table map[E]string, v E) string {
	if text, ok := table[v]; ok {
		return text
	}
	return fmt.Sprintf("%d", uint8(v))
}

// parse is the inverse of format, for values that have a text.
func parse[E ~uint8](table map[E]string, v *E, text []byte) error {
	for value, name := range table {
		if name == string(text) {
			*v = value
			return nil
		}
	}
	return fmt.Errorf("no %T is called %q", *v, text)
}
