package flows

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	yamldocs "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
)

// scenario is one document of a file of packet flows. The head of
// packetflows.yaml describes its fields.
type scenario struct {
	Name           string    `json:"name"`
	Origin         string    `json:"origin"`
	Backend        string    `json:"backend"`
	Node           node      `json:"node"`
	Services       []service `json:"services"`
	EndpointSlices []slice   `json:"endpointslices"`
	Flows          []flow    `json:"flows"`
}

type node struct {
	Name              string       `json:"name"`
	Zone              *string      `json:"zone"`
	IPFamily          family       `json:"ipFamily"`
	PrimaryIP         netip.Addr   `json:"primaryIP"`
	LocalIPs          []netip.Addr `json:"localIPs"`
	LocalCIDR         netip.Prefix `json:"localCIDR"`
	NodePortAddresses []string     `json:"nodePortAddresses"`
	ServiceCIDRs      []string     `json:"serviceCIDRs"`
	MasqueradeAll     bool         `json:"masqueradeAll"`
}

type family = corev1.IPFamily

// service is a Service in one line. Its addresses stay text: bad ones are part of
// what is tested.
type service struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	corev1.ServiceSpec
	LoadBalancerIngress []corev1.LoadBalancerIngress `json:"loadBalancerIngress"`
}

type slice struct {
	Name        string                     `json:"name"`
	Service     string                     `json:"service"` // namespace/name
	AddressType discoveryv1.AddressType    `json:"addressType"`
	Ports       []discoveryv1.EndpointPort `json:"ports"`
	Endpoints   []endpoint                 `json:"endpoints"`
}

type endpoint struct {
	Addresses []string `json:"addresses"`
	NodeName  *string  `json:"nodeName"`
	Zone      *string  `json:"zone"`
	Hostname  *string  `json:"hostname"`
	discoveryv1.EndpointConditions
	ForZones []string `json:"forZones"`
	ForNodes []string `json:"forNodes"`
}

type flow struct {
	Name     string          `json:"name"`
	SourceIP netip.Addr      `json:"sourceIP"`
	DestIP   netip.Addr      `json:"destIP"`
	DestPort uint16          `json:"destPort"`
	Protocol corev1.Protocol `json:"protocol"`
	Output   []string        `json:"output"`
	Masq     bool            `json:"masq"`
}

func (f flow) dest() netip.AddrPort { return netip.AddrPortFrom(f.DestIP, f.DestPort) }

// What a flow's output may be, but for "address:port".
const (
	reject = "[REJECT]"
	drop   = "[DROP]"
)

// read returns the scenarios of a stream. An error names the scenario and the
// field.
func read(r io.Reader) ([]scenario, error) {
	var scenarios []scenario
	docs := yamldocs.NewYAMLReader(bufio.NewReader(r))
	for {
		doc, err := docs.Read()
		if errors.Is(err, io.EOF) {
			return scenarios, nil
		}
		if err != nil {
			return nil, err
		}
		if isEmpty(doc) {
			continue
		}
		s, err := parse(doc)
		if err != nil {
			return nil, fmt.Errorf("scenario %q: %w", nameIn(doc), err)
		}
		scenarios = append(scenarios, s)
	}
}

// isEmpty reports whether a document has nothing but comments.
func isEmpty(doc []byte) bool {
	json, err := yaml.YAMLToJSON(doc)

	return err == nil && bytes.Equal(json, []byte("null"))
}

// nameIn finds the name of a scenario that cannot be read.
func nameIn(doc []byte) string {
	var named struct {
		Name string `json:"name"`
	}
	_ = yaml.Unmarshal(doc, &named) // empty then

	return named.Name
}

func parse(doc []byte) (scenario, error) {
	var s scenario
	if err := yaml.UnmarshalStrict(doc, &s, yaml.DisallowUnknownFields); err != nil {
		return scenario{}, err
	}
	if s.Name == "" || s.Node.Name == "" {
		return scenario{}, errors.New("name, node.name: both are needed")
	}
	for i := range s.Flows {
		if err := s.Flows[i].complete(); err != nil {
			return scenario{}, fmt.Errorf("flow %q: %w", s.Flows[i].Name, err)
		}
	}

	return s, nil
}

// complete checks a flow, and writes its output as this package compares it.
func (f *flow) complete() error {
	switch {
	case !f.SourceIP.IsValid():
		return errors.New("sourceIP: missing")
	case !f.DestIP.IsValid():
		return errors.New("destIP: missing")
	case f.Output == nil:
		return errors.New("output: missing")
	case !slices.Contains([]corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP, protocolICMP}, f.Protocol):
		return fmt.Errorf("protocol: unknown: %q", f.Protocol)
	}
	for i, text := range f.Output {
		if text == "REJECT" || text == "DROP" {
			f.Output[i] = "[" + text + "]"
			continue
		}
		target, err := netip.ParseAddrPort(text)
		if err != nil {
			return fmt.Errorf("output[%d]: %w", i, err)
		}
		f.Output[i] = target.String()
	}
	slices.Sort(f.Output)
	f.Output = slices.Compact(f.Output)

	return nil
}

// mustRead returns the scenarios of a file.
func mustRead(t *testing.T, path string) []scenario {
	t.Helper()
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	scenarios, err := read(file)
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	if len(scenarios) == 0 {
		t.Fatalf("%s: no scenario in it", path)
	}

	return scenarios
}
