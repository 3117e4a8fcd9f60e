package main

import (
	"context"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/bench/load"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

func must(err error) {
	if err != nil {
		panic(err)
	}
}

const svc = `apiVersion: v1
kind: Service
metadata: {name: web, namespace: default}
spec:
  clusterIP: 10.96.0.10
  clusterIPs: [10.96.0.10]
  type: NodePort
  ports: [{name: tcp, port: 80, protocol: TCP, nodePort: 30080},{name: udp, port: 53, protocol: UDP, nodePort: 30053}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: default, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: tcp, port: 8080, protocol: TCP},{name: udp, port: 8080, protocol: UDP}]
endpoints:
- {addresses: [10.244.1.3], nodeName: node-1, conditions: {ready: true}}
- {addresses: [10.244.2.2], nodeName: node-2, conditions: {ready: true}}
---
apiVersion: networking.k8s.io/v1
kind: ServiceCIDR
metadata: {name: kubernetes}
spec: {cidrs: [10.96.0.0/12]}
---
apiVersion: v1
kind: Node
metadata: {name: node-1}
status: {addresses: [{type: InternalIP, address: 192.168.50.1}]}
`

func main() {
	lab.Main()
	load.Main()
	kinds := flag.String("kind", "connect", "")
	rounds := flag.Int("rounds", 7, "")
	dur := flag.Duration("d", time.Second, "")
	clients := flag.Int("c", 16, "")
	bin := flag.String("bin", "", "comma")
	flag.Parse()
	kind := load.Kind(*kinds)
	var closers []func() error
	defer func() {
		for _, c := range slices.Backward(closers) {
			if err := c(); err != nil {
				fmt.Println(err)
			}
		}
	}()
	dir, err := os.MkdirTemp("", "exp")
	must(err)
	closers = append(closers, func() error { return os.RemoveAll(dir) })
	must(os.WriteFile(filepath.Join(dir, "m.yaml"), []byte(svc), 0o600))
	type side struct {
		name string
		*lab.Cluster
		cg *lab.Cgroup
	}
	var sides []side
	names := append([]string{"ref"}, filepath.SplitList(*bin)...)
	for _, name := range names {
		s := side{name: name}
		s.Cluster, err = lab.New(lab.Config{Nodes: 2, PodsPerNode: 2, Client: true, Attachment: lab.PointToPoint})
		must(err)
		closers = append(closers, s.Cluster.Close)
		s.cg, err = lab.NewCgroup("exp")
		must(err)
		closers = append(closers, s.cg.Close)
		for _, p := range s.Pods() {
			srv, err := load.Serve(p.Namespace, 8080)
			must(err)
			closers = append(closers, srv.Close)
			s.Client.AddRoute(netip.PrefixFrom(p.IPv4, 32), p.Node.IPv4)
		}
		if name != "ref" {
			n, err := sluice.NewNode(sluice.Config{Binary: name, Namespace: s.Nodes[0].Namespace, Cgroup: s.cg, NodeName: "node-1", Manifests: dir,
				Args: []string{"--flow-table-memory", "256Mi"}})
			must(err)
			closers = append(closers, n.Close)
			if os.Getenv("STATUS") != "" {
				closers = append(closers, func() error { out, _ := n.Run("status"); fmt.Println(out); return nil })
			}
			must(n.Start())
			ctx, c := context.WithTimeout(context.Background(), time.Minute)
			must(n.Wait(ctx))
			c()
		}
		sides = append(sides, s)
	}
	if os.Getenv("HOLD") != "" {
		fmt.Println("holding")
		time.Sleep(time.Hour)
	}
	type key struct{ side, path, m string }
	vals := map[key][]float64{}
	sp, bp := uint16(80), uint16(8080)
	np := uint16(30080)
	if kind[0] == 'u' {
		sp, np = 53, 30053
	}
	for r := range *rounds {
		order := slices.Clone(sides)
		if r%2 == 1 {
			slices.Reverse(order)
		}
		base := map[string]float64{}
		for _, s := range order {
			for _, path := range []string{"direct", "service", "out-near", "np-near", "out-far", "np-far"} {
				if s.name == "ref" && (path == "service" || path[:2] == "np") {
					continue
				}
				ap := func(ip string, p uint16) netip.AddrPort { return netip.AddrPortFrom(netip.MustParseAddr(ip), p) }
				var to []netip.AddrPort
				ns, cg := s.Nodes[0].Pods[0].Namespace, s.cg
				switch path {
				case "direct":
					to = []netip.AddrPort{ap("10.244.1.3", bp), ap("10.244.2.2", bp)}
				case "service":
					to = []netip.AddrPort{ap("10.96.0.10", sp)}
				case "out-near":
					to = []netip.AddrPort{ap("10.244.1.3", bp)}
				case "out-far":
					to = []netip.AddrPort{ap("10.244.2.2", bp)}
				default:
					to = []netip.AddrPort{ap("192.168.50.1", np)}
				}
				if path[:2] == "ou" || path[:2] == "np" {
					if os.Getenv("OUT") == "" || path == "np-far" || path == "np-near" && false {
						continue
					}
					ns, cg = s.Client.Namespace, nil
				}
				res, err := load.Run(context.Background(), ns, cg, load.Work{Kind: kind, Targets: to, Clients: *clients, WarmUp: 100 * time.Millisecond, Duration: *dur})
				must(err)
				if res.Failed > 0 {
					fmt.Println("round", r, s.name, path, res.Failed, res.FirstError)
					for _, nn := range []*lab.Namespace{ns, s.Nodes[0].Namespace, s.Nodes[0].Pods[1].Namespace} {
						out, err := exec.Command("nsenter", "--net="+nn.Path(), "nstat", "-asz").CombinedOutput()
						fmt.Println(nn.Name(), err)
						for l := range strings.Lines(string(out)) {
							if f := strings.Fields(l); len(f) > 1 && f[1] != "0" && !strings.Contains(l, "InOct") && !strings.Contains(l, "Ip6") {
								fmt.Print("   ", f[0], "=", f[1])
							}
						}
						fmt.Println()
					}
				}
				k := s.name + " " + path
				vals[key{s.name, path, "rate"}] = append(vals[key{s.name, path, "rate"}], res.PerSecond())
				vals[key{s.name, path, "p50"}] = append(vals[key{s.name, path, "p50"}], float64(res.Latencies.Quantile(.5))/1e3)
				vals[key{s.name, path, "cpu"}] = append(vals[key{s.name, path, "cpu"}], float64(res.Machine.Busy())/1e3/float64(res.Succeeded))
				base[k] = res.PerSecond()
			}
		}
	}
	med := func(v []float64) float64 { v = slices.Sorted(slices.Values(v)); return v[len(v)/2] }
	for _, s := range sides {
		for _, path := range []string{"direct", "service", "out-near", "np-near"} {
			for _, m := range []string{"rate", "p50", "cpu"} {
				v := vals[key{s.name, path, m}]
				if v == nil {
					continue
				}
				ctl := "direct"
				if path[:2] == "ou" || path[:2] == "np" {
					ctl = "out-near"
				}
				ref := vals[key{"ref", ctl, m}]
				var ratios []float64
				for i := range v {
					ratios = append(ratios, v[i]/ref[i])
				}
				rs := slices.Sorted(slices.Values(ratios))
				fmt.Printf("%-30s %-9s %-5s %10.1f  x ref %.3f (%.3f..%.3f)\n", filepath.Base(s.name), path, m, med(v), med(ratios), rs[len(rs)/4], rs[len(rs)*3/4])
			}
		}
	}
}
