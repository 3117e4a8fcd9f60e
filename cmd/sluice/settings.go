package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/runtime"
	logsapi "k8s.io/component-base/logs/api/v1"

	"github.com/sluice-lb/sluice/pkg/config"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// settings are kube-proxy's configuration as it is in force, from the file or from
// flags, and what of it is to be reported.
type settings struct {
	kubeProxy *config.KubeProxy
	file      *config.File // nil without --config
	// nodePortsByDefault is set if nodePortAddresses is not.
	nodePortsByDefault bool
	// unknown names the fields of the file that kube-proxy does not have.
	unknown error
	// unknownGates are feature gates that Sluice does not know.
	unknownGates []string
	// ignored are flags that are set, and are ignored because there is a file.
	ignored []string
	// unused are fields and flags that are set and have no effect in Sluice.
	unused []string
}

// resolve returns the settings, complete and valid. Which flags take precedence
// over the file is kube-proxy's rule.
func (f *kubeProxyFlags) resolve() (*settings, error) {
	s := &settings{kubeProxy: f.cfg}
	var err error
	if f.file != "" {
		err = s.read(f)
	} else {
		f.fillIn()
	}
	// --hostname-override takes precedence over the file.
	if err == nil && f.hostnameOverride != "" {
		if s.kubeProxy.HostnameOverride = normalName(f.hostnameOverride); s.kubeProxy.HostnameOverride == "" {
			err = fmt.Errorf("--hostname-override %q: it is blank", f.hostnameOverride)
		}
	}
	if err == nil {
		s.nodePortsByDefault = len(s.kubeProxy.NodePortAddresses) == 0
		if s.nodePortsByDefault && f.file == "" && !f.set.Changed("proxy-mode") {
			s.kubeProxy.NodePortAddresses = []string{lb.NodePortsPrimary}
		}
		config.Complete(s.kubeProxy)
		err = config.Validate(s.kubeProxy)
	}
	if err != nil {
		return nil, err
	}
	if _, s.unknownGates, err = config.Gates(s.kubeProxy.FeatureGates); err != nil {
		return nil, err
	}
	s.unused = config.Unused(s.kubeProxy)
	if f.file == "" && !f.set.Changed("ipvs-min-sync-period") { // its default is another than the file's
		s.unused = slices.DeleteFunc(s.unused, func(name string) bool { return name == "ipvs.minSyncPeriod" })
	}
	for _, name := range []string{"boot-id-file", "machine-id-file"} { // they are no fields
		if f.file == "" && f.set.Changed(name) {
			s.unused = append(s.unused, "--"+name)
		}
	}

	return s, nil
}

// read takes the configuration from the file, with the logging flags merged in.
func (s *settings) read(f *kubeProxyFlags) error {
	var err error
	if s.file, err = config.Open(f.file); err != nil {
		return fmt.Errorf("--config: %w", err)
	}
	if s.kubeProxy, s.unknown, err = s.file.Decode(); err != nil {
		return fmt.Errorf("--config: %w", err)
	}
	f.set.VisitAll(func(flag *pflag.Flag) {
		used := slices.Contains(usedWithFile, flag.Name) || isLogging(flag.Name)
		if flag.Changed && !used && slices.Contains(f.names, flag.Name) {
			s.ignored = append(s.ignored, "--"+flag.Name)
		}
	})

	return f.copyLogging(&s.kubeProxy.Logging)
}

// fillIn sets the fields that depend on several flags.
func (f *kubeProxyFlags) fillIn() {
	cfg := f.cfg
	if f.writeTo == "" {
		cfg.HealthzBindAddress = config.WithPort(cfg.HealthzBindAddress, int(f.healthzPort))
		cfg.MetricsBindAddress = config.WithPort(cfg.MetricsBindAddress, int(f.metricsPort))
		if f.healthzPort == 0 {
			cfg.HealthzBindAddress = ""
		}
		if f.metricsPort == 0 {
			cfg.MetricsBindAddress = "" // Validate refuses it: metrics cannot be switched off
		}
	}
	*config.MasqueradeAll(cfg) = f.masqueradeAll
	period, least := config.SyncPeriods(cfg)
	period.Duration, least.Duration = f.iptablesSync, f.iptablesMin
	if cfg.Mode == config.ModeIPVS {
		period.Duration, least.Duration = f.ipvsSync, f.ipvsMin
	}
}

// copyLogging copies the logging flags that are set over the file's fields.
func (f *kubeProxyFlags) copyLogging(to *logsapi.LoggingConfiguration) error {
	var flags pflag.FlagSet
	written := *to
	logsapi.AddFlags(to, &flags)
	*to = written // AddFlags has set some fields to their defaults
	vmodule := to.VModule
	to.VModule = nil
	var errs []error
	flags.VisitAll(func(flag *pflag.Flag) {
		if given := f.set.Lookup(flag.Name); given != nil && given.Changed {
			errs = append(errs, flag.Value.Set(given.Value.String()))
		}
	})
	to.VModule = append(to.VModule, vmodule...) // the first pattern that matches decides

	return errors.Join(errs...)
}

// nodeName returns the name of this node's Node object: the configured one, or that of the host.
func (s *settings) nodeName() (string, error) {
	given, field := s.kubeProxy.HostnameOverride, "hostnameOverride"
	if given == "" {
		host, err := os.Hostname()
		if err != nil {
			return "", fmt.Errorf("host name: %w", err)
		}
		given, field = host, "host name"
	}
	name := normalName(given)
	if name == "" {
		return "", fmt.Errorf("%s %q: it is blank", field, given)
	}

	return name, nil
}

// normalName returns a name without blanks around it and in lower case.
func normalName(name string) string { return strings.ToLower(strings.TrimSpace(name)) }

// report logs, once and in one line each, the fields and flags that are accepted
// and do nothing.
func (s *settings) report(log *slog.Logger) {
	unknown, twice := s.strictErrors()
	if len(unknown) > 0 {
		log.Warn("the configuration file has fields that kube-proxy does not know; they are ignored", "unknown", unknown)
	}
	if len(twice) > 0 {
		log.Warn("the configuration file has keys that are given twice; the last one counts", "twice", twice)
	}
	if len(s.unknownGates) > 0 {
		log.Warn("the configuration has feature gates that Sluice does not know: those of another version of Kubernetes, or misspelt ones; they are ignored",
			"featureGates", s.unknownGates)
	}
	if len(s.ignored) > 0 {
		log.Warn("flags are ignored because there is a configuration file", "flags", s.ignored)
	}
	if len(s.unused) > 0 {
		log.Info("settings without an effect in Sluice", "fields", s.unused)
	}
}

// strictErrors returns texts about fields of the file that kube-proxy does not have, and about keys that are given twice.
func (s *settings) strictErrors() (unknown, twice []string) {
	strict, ok := runtime.AsStrictDecodingError(s.unknown)
	if !ok {
		return nil, nil
	}
	for _, err := range strict.Errors() {
		if text := err.Error(); strings.Contains(text, "already set in map") {
			twice = append(twice, text)
		} else {
			unknown = append(unknown, text)
		}
	}

	return unknown, twice
}

// unknownParts returns what Sluice does not know of the configuration, a text for each part.
func (s *settings) unknownParts() []string {
	unknown, twice := s.strictErrors()
	parts := slices.Concat(unknown, twice)
	for _, name := range s.unknownGates {
		parts = append(parts, fmt.Sprintf("featureGates[%s]: Sluice knows no such gate", name))
	}

	return parts
}

// write writes the configuration into a file, for --write-config-to.
func (s *settings) write(path string) error {
	text, err := config.Encode(s.kubeProxy)
	if err == nil {
		err = os.WriteFile(path, text, 0o644)
	}
	if err != nil {
		return fmt.Errorf("--write-config-to: %w", err)
	}

	return nil
}
