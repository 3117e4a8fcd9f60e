package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/test/lab"
)

// mustPin pins maps with a few flows and Services, and returns the bpf root.
func mustPin(t *testing.T) string {
	t.Helper()
	root := lab.MustBPFRoot(t)
	pinned, err := maps.Create(root, maps.Options{Capacities: map[string]uint32{
		maps.NameFrontendIDs: 16, maps.NameAffinity: 16, maps.NameUDPPins: 16, maps.NameFlows: 1024, maps.NameHalfOpen: 1024, maps.NameUnanswered: 1024,
	}})
	lab.Must(t, err)
	defer pinned.Close()
	for id, name := range map[uint32][2]string{1: {"web", "main"}, 2: {"dns", "main"}, 3: {"quiet", "main"}, 4: {"web", "other"}} {
		lab.Must(t, pinned.ServicePorts.Put(id, maps.ServicePortOf("shop", name[0], name[1], 6, 4)))
	}
	at := func(text string) (maps.Addr, uint16) {
		a := netip.MustParseAddrPort(text)

		return maps.AddrOf(a.Addr()), maps.Port(a.Port())
	}
	for i, id := range []uint32{1, 2, 1} {
		f := maps.Flow{Proto: 6, State: maps.FlowOpen, Role: maps.FlowFromClient, ServicePortId: id, BackendId: id}
		f.Client, f.ClientPort = at(fmt.Sprintf("198.51.100.7:%d", 40000+i))
		f.StackPort = f.ClientPort
		f.OriginalDst, f.OriginalPort = at("10.96.0.1:80")
		f.Backend, f.BackendPort = at("10.244.2.2:8080")
		if id == 2 {
			f.Masquerade, f.MasqueradePort = at("192.168.50.1:10001")
			f.Flags, f.StackPort = maps.FlowMasqueraded, maps.Port(10002)
		}
		// Any machine that runs this has been up for so long.
		f.LastSeen = maps.Now() - 1e9
		f.Created = f.LastSeen - 1e9
		lab.Must(t, pinned.Flows.Put(f.Key(f.Role), f))
	}

	return root
}

func runVerb(root string, args ...string) (string, error) {
	var out bytes.Buffer
	cmd := newRoot()
	cmd.SetArgs(append([]string{"--bpf-root", root}, args...))
	cmd.SetOut(&out)
	err := cmd.Execute()

	return out.String(), err
}

// The lines of the table, with one blank between columns.
const (
	header = "SERVICE PROTOCOL CLIENT DESTINATION BACKEND MASQUERADE STACK PORT STATE AGE IDLE\n"
	dns    = "shop/dns:main TCP 198.51.100.7:40001 10.96.0.1:80 10.244.2.2:8080 192.168.50.1:10001 10002 established 2s 1s\n"
	first  = "shop/web:main TCP 198.51.100.7:40000 10.96.0.1:80 10.244.2.2:8080 - - established 2s 1s\n"
	third  = "shop/web:main TCP 198.51.100.7:40002 10.96.0.1:80 10.244.2.2:8080 - - established 2s 1s\n"
)

// squeeze replaces runs of blanks by one: widths of columns depend on their content.
func squeeze(text string) string { return regexp.MustCompile(` +`).ReplaceAllString(text, " ") }

func TestFlows(t *testing.T) {
	root := mustPin(t)
	for _, test := range []struct {
		args []string
		want string
	}{
		{[]string{"flows"}, header + dns + first + third},
		{[]string{"flows", "web"}, header + first + third},
		{[]string{"flows", "shop/dns"}, header + dns},
		{[]string{"flows", "shop/quiet"}, header},
		{[]string{"flows", "shop/quiet", "-o", "json"}, "[]\n"},
		{[]string{"flows", "shop/quiet", "-o", "yaml"}, "[]\n"},
	} {
		have, err := runVerb(root, test.args...)
		have = squeeze(have)
		// The test may take some time.
		have = regexp.MustCompile(`established \S+ \S+\n`).ReplaceAllString(have, "established 2s 1s\n")
		if diff := cmp.Diff(strings.Split(test.want, "\n"), strings.Split(have, "\n")); diff != "" || err != nil {
			t.Errorf("%v: %v (-want +have):\n%s", test.args, err, diff)
		}
	}
	for want, args := range map[string][]string{
		`no Service is called "nosuch"`: {"flows", "nosuch"},
		`"xml"`:                         {"flows", "-o", "xml"},
	} {
		if _, err := runVerb(root, args...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, want an error with %s", args, err, want)
		}
	}
	if _, err := runVerb(root+"-nosuch", "flows"); err == nil || !strings.Contains(err.Error(), "nothing is programmed") {
		t.Errorf("without maps: %v", err)
	}
}

// A node whose maps are of another build is not one on which nothing is programmed.
func TestMapsOfAnotherBuild(t *testing.T) {
	root := t.TempDir()
	lab.Must(t, os.Mkdir(root+"/v3", 0o700))
	if _, err := runVerb(root, "flows"); err == nil || !strings.Contains(err.Error(), "another build") {
		t.Errorf("flows: %v, want that the maps are of another build", err)
	}
	out, err := runVerb(root, "--socket", root+"/nosuch", "status")
	for _, want := range []string{"not running: what is programmed stays in force", "programs without an agent", "not known: maps of another build"} {
		if !strings.Contains(out, want) {
			t.Errorf("status (%v) is\n%swant %q in it", err, out, want)
		}
	}
}

// Writing flow by flow gives the same text as encoding all of them at once.
func TestPrintFlows(t *testing.T) {
	var flows []flow.Flow
	for i := range rowsTogether + 10 {
		flows = append(flows, flow.Flow{
			Service: "shop/web", StackPort: uint16(i), State: flow.Opening, AgeSeconds: 3605, IdleSeconds: 5,
		})
	}
	whole := map[string]func(any) ([]byte, error){
		"json": func(v any) ([]byte, error) {
			text, err := json.MarshalIndent(v, "", "  ")

			return append(text, '\n'), err
		},
		"yaml": func(v any) ([]byte, error) { return yaml.Marshal(v) },
	}
	for format, marshal := range whole {
		var have bytes.Buffer
		want, err := marshal(flows)
		lab.Must(t, err)
		if err := printFlows(&have, format, flows); err != nil || have.String() != string(want) {
			t.Errorf("%s: %v, it begins with\n%.200s\nwant\n%.200s", format, err, &have, want)
		}
	}
	var have bytes.Buffer
	if err := printFlows(&have, "table", flows); err != nil || strings.Count(have.String(), "\n") != len(flows)+1 {
		t.Errorf("table: %v, %d lines, want %d", err, strings.Count(have.String(), "\n"), len(flows)+1)
	}
	if rows := strings.Count(squeeze(have.String()), " 1h0m5s 5s\n"); rows != len(flows) {
		t.Errorf("table: %d rows with the age and the idle time, want %d", rows, len(flows))
	}
}
