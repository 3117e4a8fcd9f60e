package main

import (
	"context"
	"flag"
	"io"
	"log/slog"
	"math"
	"strconv"

	"github.com/go-logr/logr"
	logsapi "k8s.io/component-base/logs/api/v1"
	"k8s.io/klog/v2"
)

// newLog returns the agent's log, which is that of Kubernetes' packages, too.
// Errors go to stderr and so does the rest, unless the streams are to be split.
// klog has the verbosity, so that a change there changes it for all.
func newLog(cfg *logsapi.LoggingConfiguration, stdout, stderr io.Writer) (*slog.Logger, error) {
	options := &slog.HandlerOptions{Level: slog.Level(math.MinInt)} // verbosity decides
	format := func(w io.Writer) slog.Handler { return slog.NewTextHandler(w, options) }
	split := cfg.Options.Text.SplitStream
	if cfg.Format == logsapi.JSONLogFormat {
		format = func(w io.Writer) slog.Handler { return slog.NewJSONHandler(w, options) }
		split = cfg.Options.JSON.SplitStream
	}
	handler := &verbosity{Handler: format(stderr)}
	handler.info = handler.Handler
	if split {
		handler.info = format(stdout)
	}
	klog.SetLogger(logr.FromSlogHandler(&verbosity{handler.Handler, handler.info, true}))

	var flags flag.FlagSet
	klog.InitFlags(&flags)
	if err := flags.Set("v", strconv.Itoa(int(cfg.Verbosity))); err != nil {
		return nil, err
	}

	return slog.New(handler), flags.Set("vmodule", logsapi.VModuleConfigurationPflag(&cfg.VModule).String())
}

// verbosity is a handler with the verbosity of klog: a level below that of
// information is klog's V of that number.
type verbosity struct {
	slog.Handler              // for errors and warnings
	info         slog.Handler // for the rest
	checked      bool         // klog, which calls this one, has checked the verbosity
}

// callDepth is the number of functions between Enabled and the call of a
// [slog.Logger], whose source file --vmodule selects: Enabled, log and the method.
const callDepth = 4

func (v *verbosity) Enabled(_ context.Context, level slog.Level) bool {
	return v.checked || level >= slog.LevelInfo || klog.VDepth(callDepth, klog.Level(-level)).Enabled()
}

func (v *verbosity) Handle(ctx context.Context, record slog.Record) error {
	if record.Level > slog.LevelInfo {
		return v.Handler.Handle(ctx, record)
	}

	return v.info.Handle(ctx, record)
}

func (v *verbosity) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &verbosity{v.Handler.WithAttrs(attrs), v.info.WithAttrs(attrs), v.checked}
}

func (v *verbosity) WithGroup(name string) slog.Handler {
	return &verbosity{v.Handler.WithGroup(name), v.info.WithGroup(name), v.checked}
}
