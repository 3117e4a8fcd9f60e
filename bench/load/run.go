package load

import (
	"context"
	"encoding/gob"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/sluice-lb/sluice/test/lab"
)

var errMainNotCalled = errors.New("load.Main was not called first in main or TestMain")

// Run does the work in a process in a namespace and a cgroup, in both from its
// birth; each may be nil: then it is that of the calling process. It returns when
// the process has ended. The end of the context ends the process; then, the error
// wraps the context's cause. That exchanges fail is a result, no error.
//
// In the namespace it makes all ports from 1024 usable for clients, and those of
// connections closed more than a second ago usable again: without that, a target
// gets 28,000 connections a minute.
func Run(ctx context.Context, ns *lab.Namespace, cg *lab.Cgroup, w Work) (Result, error) {
	if err := w.Validate(); err != nil {
		return Result{}, err
	}
	if !mainCalled.Load() {
		return Result{}, errMainNotCalled
	}
	w = w.withDefaults()
	if err := widenPorts(ns); err != nil {
		return Result{}, fmt.Errorf("run load: %w", err)
	}
	p, err := startProcess(ns, cg, again(roleGenerator, generatorThreads(w.Clients)))
	if err != nil {
		return Result{}, fmt.Errorf("run load: %w", err)
	}
	defer p.close()
	defer context.AfterFunc(ctx, func() { _ = p.kill() })()

	var result Result
	err = json.NewEncoder(p.stdin).Encode(w)
	if err == nil {
		err = gob.NewDecoder(p.stdout).Decode(&result)
	}
	if err != nil {
		_ = p.stdin.Close() // so that it ends
	}
	if failed := p.wait(); failed != nil {
		err = failed // it has the reason why there is no result
	}
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return Result{}, fmt.Errorf("run load: %w", err)
	}

	return result, nil
}

// widenPorts makes many connections to one target possible. The calling process'
// own namespace stays as it is.
func widenPorts(ns *lab.Namespace) error {
	if ns == nil {
		return nil
	}

	return errors.Join(
		ns.Sysctl("net/ipv4/ip_local_port_range", "1024 65535"),
		ns.Sysctl("net/ipv4/tcp_tw_reuse", "1"),
	)
}
