package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// showNext prints what to do next, before everything is removed.
func (s *stage) showNext() {
	s.out.heading("What to do next")
	s.out.rows([][2]string{
		{os.Args[0] + " -stay", "plays again and stays: dial, edit the manifests, type verbs"},
		{friendly(s.cfg.sluice) + " agent --help", "with --manifests it needs no cluster"},
		{"test/demo/manifests", "the Services of this demo"},
		{"README.md", "what Sluice is, and what it is not"},
	})
}

// friendly is a path as a person here would type it.
func friendly(path string) string {
	here, err := os.Getwd()
	if err != nil {
		return path
	}
	if rel, err := filepath.Rel(here, path); err == nil && len(rel) < len(path) {
		return rel
	}

	return path
}

// stay keeps everything until ctx ends, and prints commands to try.
func (s *stage) stay(ctx context.Context) error {
	if err := s.writeScripts(); err != nil {
		return err
	}
	s.out.heading("It stays until Ctrl-C. In another terminal:")
	s.out.rows([][2]string{
		{"cd " + s.dir, ""},
		{"./sluice services", "or another verb, with the flags that lead to this agent"},
		{"./" + s.pod.name, "a shell in the pod that dials; for one on the node, ./" + s.host.name},
		{"", "and there: exec 3<>/dev/tcp/10.96.0.80/80; echo who >&3; head -1 <&3"},
		{"vi manifests/web.yaml", "or the other ones: the agent follows"},
	})
	<-ctx.Done()

	return nil
}

// writeScripts puts shortcuts into the folder.
func (s *stage) writeScripts() error {
	places, err := placesOf(s.agent.PID())
	if err != nil {
		return err
	}
	binary, err := filepath.Abs(s.agent.Binary())
	if err != nil {
		return err
	}
	enter := fmt.Sprintf("#!/bin/sh\necho $$ >%s/cgroup.procs\n", s.cgroup.Path())
	shell := `"${@:-bash}"`
	for name, text := range map[string]string{
		"sluice":    "#!/bin/sh\n" + execIn(s.node.Path(), fmt.Sprintf(`'%s' "$@" %s`, binary, places)),
		s.pod.name:  enter + execIn(s.clientIn.Path(), shell),
		s.host.name: enter + execIn(s.node.Path(), shell),
	} {
		if err := os.WriteFile(filepath.Join(s.dir, name), []byte(text), 0o755); err != nil {
			return err
		}
	}

	return nil
}

func execIn(namespace, command string) string {
	return fmt.Sprintf("exec nsenter --net=%s %s\n", namespace, command)
}

// placesOf returns the flags for where an agent keeps what other verbs
// need, from its command line.
func placesOf(pid int) (string, error) {
	text, err := os.ReadFile(filepath.Join(procOf(pid), "cmdline"))
	if err != nil {
		return "", fmt.Errorf("flags of the agent: %w", err)
	}
	var places []string
	args := strings.Split(string(text), "\x00")
	for i, arg := range args[:len(args)-1] {
		switch arg {
		case "--bpf-root", "--cgroup-root", "--socket":
			places = append(places, arg, args[i+1])
		}
	}

	return strings.Join(places, " "), nil
}
