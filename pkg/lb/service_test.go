package lb

import (
	"encoding/json"
	"fmt"
	"testing"
)

func TestStrings(t *testing.T) {
	name := ServiceName{"ns", "web"}
	for _, test := range []struct {
		value fmt.Stringer
		want  string
	}{
		{FrontendKey{ip("10.96.0.1"), 80, TCP, Internal}, "10.96.0.1:80/TCP internal"},
		{FrontendKey{ip("fd00::1"), 53, UDP, External}, "[fd00::1]:53/UDP external"},
		{FrontendKey{Addr: ip("10.96.0.1"), Scope: External}, "10.96.0.1:*/any external"},
		{FrontendKey{Addr: ip("fd00::1"), Scope: Internal}, "[fd00::1]:*/any internal"},
		{PortName{name, "http", TCP}, "ns/web:http"},
		{PortName{name, "", UDP}, "ns/web"},
		{name, "ns/web"},
		{SliceName{"ns", "web-abc"}, "ns/web-abc"},
		{SCTP, "SCTP"},
		{Protocol(1), "1"},
		{KindExternalIP, "ExternalIP"},
		{Cluster, "Cluster"},
		{Local, "Local"},
		{IPv4, "IPv4"},
		{IPv6, "IPv6"},
		{ExternalName, "ExternalName"},
		{NotLocal, "other node (traffic policy Local)"},
	} {
		if got := test.value.String(); got != test.want {
			t.Errorf("%#v reads %q, want %q", test.value, got, test.want)
		}
	}
}

func TestTextRoundTrip(t *testing.T) {
	roundTrip(t, protocolText)
	roundTrip(t, scopeText)
	roundTrip(t, kindText)
	roundTrip(t, useText)
}

// roundTrip writes and reads every value, and checks that an unknown text is refused.
func roundTrip[E interface {
	~uint8
	comparable
}](t *testing.T, table map[E]string) {
	t.Helper()
	for value, text := range table {
		written, err := json.Marshal(value)
		if err != nil || string(written) != `"`+text+`"` {
			t.Errorf("%v is written as %s, %v", value, written, err)
		}
		var read E
		if err := json.Unmarshal(written, &read); err != nil || read != value {
			t.Errorf("%s is read as %v, %v", written, read, err)
		}
	}
	var read E
	if err := json.Unmarshal([]byte(`"nonsense"`), &read); err == nil {
		t.Errorf("nonsense is read as %v", read)
	}
}

// Every use has a text, and no two have the same.
func TestUseTexts(t *testing.T) {
	seen := make(map[string]bool)
	for use := Used; use <= NoFrontend; use++ {
		text, ok := useText[use]
		if !ok || seen[text] {
			t.Errorf("use %d reads %q: missing or a duplicate", use, text)
		}
		seen[text] = true
	}
}
