// Package compat holds what is said about everything that kube-proxy shows to
// the outside: its flags, the fields of its configuration file, endpoints,
// metrics and events. There is one YAML file for each, a list of [Row]. The
// package's test checks them, and that docs/kube-proxy.md is made of them;
// with -update it writes that file.
package compat
