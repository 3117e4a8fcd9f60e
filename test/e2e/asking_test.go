package e2e

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

// Who asks an agent about Services does not make it need much memory, whatever they are: frontends refer to the backends
// that they share, and answers are sent as they are made. Here one Service has as many frontends as one may have, at
// 32,766 external IPs, each with 250 backends; another has 5,000 ports.
func TestAskingTakesLittleMemory(t *testing.T) {
	manifests := t.TempDir()
	must := func(name string, objects ...any) {
		var text strings.Builder
		for _, object := range objects {
			lab.Must(t, json.NewEncoder(&text).Encode(object))
			text.WriteString("---\n")
		}
		lab.Must(t, os.WriteFile(filepath.Join(manifests, name+".yaml"), []byte(text.String()), 0o600))
	}
	type object = map[string]any
	var ips []string
	for i := range 32766 {
		ips = append(ips, fmt.Sprintf("198.18.%d.%d", i>>8, i&255))
	}
	var endpoints []object
	for i := range 250 {
		endpoints = append(endpoints, object{"addresses": []string{fmt.Sprintf("10.244.2.%d", i+1)}})
	}
	var ports, slicePorts []object
	for i := range 5000 {
		ports = append(ports, object{"name": fmt.Sprintf("p%d", i), "port": 10000 + i})
		if i < 100 {
			slicePorts = append(slicePorts, object{"name": fmt.Sprintf("p%d", i), "port": 10000 + i})
		}
	}
	service := func(name, ip string, spec object) object {
		spec["clusterIP"] = ip
		return object{"apiVersion": "v1", "kind": "Service", "metadata": object{"namespace": "shop", "name": name}, "spec": spec}
	}
	slice := func(of string, ports, endpoints []object) object {
		return object{
			"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4", "ports": ports, "endpoints": endpoints,
			"metadata": object{"namespace": "shop", "name": of + "-1", "labels": object{"kubernetes.io/service-name": of}},
		}
	}
	must("hog", service("hog", "10.96.0.7", object{"externalIPs": ips, "ports": []object{{"name": "http", "port": 80}}}),
		slice("hog", []object{{"name": "http", "port": 8080}}, endpoints))
	must("wide", service("wide", "10.96.0.8", object{"ports": ports}), slice("wide", slicePorts, endpoints[:2]))

	node, err := sluice.NewNode(sluice.Config{
		Binary: sluice.MustBinary(t), Namespace: lab.MustNew(t, lab.Config{Nodes: 1}).Nodes[0].Namespace,
		Cgroup: lab.MustCgroup(t, "e2e"), NodeName: "node-1", Manifests: manifests,
	})
	lab.Must(t, err)
	t.Cleanup(func() { node.Close() })
	lab.Must(t, node.Start())
	lab.Must(t, node.WaitSynced(t.Context()))

	// What a verb prints is checked as it comes: it is half a gigabyte.
	addresses := func(verb ...string) func() error {
		return func() error {
			read, write := io.Pipe()
			var group errgroup.Group
			group.Go(func() error { return write.CloseWithError(node.Exec(write, os.Stderr, verb...)) })
			n, err := io.Copy(io.Discard, read)
			if err != nil || n < 20_000 {
				return fmt.Errorf("%v prints %d bytes: %w", verb, n, err)
			}

			return group.Wait()
		}
	}
	for _, test := range []struct {
		name string
		ask  []func() error
	}{
		{"two lists of all Services at a time", []func() error{addresses("services", "-o", "json"), addresses("services", "-o", "json")}},
		{"a comparison with the maps", []func() error{func() error {
			text, err := node.Run("verify")
			if differences := regexp.MustCompile(`(\d+) differences`).FindString(text); differences != "0 differences" {
				return fmt.Errorf("verify: %s: %w", text, err)
			}

			return err
		}}},
		{"the backends of a Service of 5,000 ports", []func() error{addresses("backends", "wide")}},
	} {
		t.Run("it is asked for "+test.name, func(t *testing.T) {
			before, user := memoryOf(t, node.PID(), "VmRSS"), userTime(t, node.PID())
			// The highest is counted from now on.
			lab.Must(t, os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", node.PID()), []byte("5"), 0))
			var group errgroup.Group
			for _, ask := range test.ask {
				group.Go(ask)
			}
			if err := group.Wait(); err != nil {
				t.Fatal(err)
			}
			most := memoryOf(t, node.PID(), "VmHWM")
			t.Logf("memory: %d MiB before, %d MiB at most; %d ms of CPU", before>>10, most>>10, userTime(t, node.PID())-user)
			if most-before > 50<<10 {
				t.Errorf("the agent needs %d MiB more than the %d MiB before", (most-before)>>10, before>>10)
			}
		})
	}
}

// memoryOf returns a line of the status of a process, in KiB.
func memoryOf(t *testing.T, pid int, line string) int {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	lab.Must(t, err)
	match := regexp.MustCompile(line + `:\s+(\d+) kB`).FindSubmatch(text)
	if match == nil {
		t.Fatalf("there is no %s:\n%s", line, text)
	}
	kib, err := strconv.Atoi(string(match[1]))
	lab.Must(t, err)

	return kib
}

// userTime returns how long a process has run, in milliseconds.
func userTime(t *testing.T, pid int) int {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	lab.Must(t, err)
	_, rest, _ := strings.Cut(string(text), ") ")
	fields := strings.Fields(rest)
	user, err := strconv.Atoi(fields[11])
	lab.Must(t, err)
	system, err := strconv.Atoi(fields[12])
	lab.Must(t, err)

	return (user + system) * 10
}
