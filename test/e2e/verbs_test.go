package e2e

import (
	"bytes"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

// No verb takes absence for health, an empty list for a proof, or what it cannot find out for an answer: neither by its
// exit code nor by what it prints as JSON.
func TestVerbsWithoutAnswers(t *testing.T) {
	const nothing, noAgent, noService = "nothing is programmed", "no agent is running", `no Service is called "nosuch"`
	node, err := sluice.NewNode(sluice.Config{
		Binary: sluice.MustBinary(t), Namespace: lab.MustNew(t, lab.Config{Nodes: 1}).Nodes[0].Namespace,
		Cgroup: lab.MustCgroup(t, "e2e"), NodeName: "node-1", Manifests: "testdata/troubleshoot",
	})
	lab.Must(t, err)
	t.Cleanup(func() { node.Close() })
	type wanted struct {
		fails  bool
		stdout string // a part of it; empty: nothing is printed
		stderr string
	}
	must := func(state string, verbs map[string]wanted) {
		for verb, want := range verbs {
			var out, errs bytes.Buffer
			args := strings.Fields(verb)
			if args[0] != "cleanup" && args[0] != "top" {
				args = append(args, "-o", "json")
			}
			err := node.Exec(&out, &errs, args...)
			switch {
			case (err != nil) != want.fails:
				t.Errorf("%s, sluice %s: %v, want a failure: %v", state, verb, err, want.fails)
			case want.stdout == "" && out.Len() > 0, !strings.Contains(out.String(), want.stdout), !strings.Contains(errs.String(), want.stderr):
				t.Errorf("%s, sluice %s prints\n%s%s, want %q and %q", state, verb, &out, &errs, want.stdout, want.stderr)
			case strings.HasPrefix(out.String(), "null"):
				t.Errorf("%s, sluice %s prints null", state, verb)
			}
		}
	}
	must("nothing was ever programmed", map[string]wanted{
		"status":                         {true, `"running": false`, "may not work"},
		"services":                       {true, "", nothing},
		"services nosuch":                {true, "", nothing},
		"backends":                       {true, "", nothing},
		"flows":                          {true, "", nothing},
		"connections":                    {true, "", nothing},
		"monitor --since 1m --no-follow": {true, "", nothing},
		"top --once":                     {true, "", nothing},
		"explain --to 10.9.9.9:80":       {true, "", nothing},
		"verify":                         {true, "", noAgent},
		"verify --against kube-proxy":    {true, "", nothing},
		"cleanup --kube-proxy":           {true, "", noAgent},
		"doctor":                         {false, `"check": "agent"`, ""},
	})
	lab.Must(t, node.Start())
	lab.Must(t, node.WaitSynced(t.Context()))
	unknown := map[string]wanted{
		"services nosuch":              {true, "", noService},
		"backends nosuch":              {true, "", noService},
		"flows nosuch":                 {true, "", noService},
		"connections --service nosuch": {true, "", noService},
		"monitor --service nosuch":     {true, "", noService},
		"top --once nosuch":            {true, "", noService},
		"explain --to nosuch:80":       {true, "", noService},
		"explain --to shop/web:81":     {true, "", "it has http 80/tcp"},
		"verify --against kube-proxy":  {true, "", "kube-proxy has no rules in this network namespace"},
		"flows":                        {false, "[]\n", ""},
		"connections":                  {false, "[]\n", ""},
	}
	must("the agent runs", unknown)
	must("the agent runs", map[string]wanted{
		"status": {false, `"running": true`, ""}, "services": {false, "shop/web", ""}, "verify": {false, `"differences": []`, ""},
	})
	lab.Must(t, node.Kill())
	must("the agent was killed", unknown)
	must("the agent was killed", map[string]wanted{
		"status":               {true, `"running": false`, "may not work"},
		"services":             {false, "shop/web", "These are the Services in the maps"},
		"backends":             {false, "shop/dns", "endpoints without traffic are not in there"},
		"verify":               {true, "", noAgent},
		"cleanup --kube-proxy": {true, "", noAgent},
	})
}
