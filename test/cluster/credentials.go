package cluster

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"
)

// credentials are those by which the API server and its clients authenticate.
// Except for the last two fields they are paths of files.
type credentials struct {
	certificate       string // the API server's; its own authority
	key               string // of the certificate
	serviceAccountKey string // signs the tokens of ServiceAccounts
	tokens            string // static tokens: one, in system:masters
	kubeconfig        string

	token     string
	authority []byte // the certificate, PEM
}

// config returns how the client with the token reaches url.
func (c *credentials) config(url string) *rest.Config {
	return &rest.Config{
		Host:            url,
		BearerToken:     c.token,
		TLSClientConfig: rest.TLSClientConfig{CAData: c.authority},
		QPS:             -1, // no limit
	}
}

// writeCredentials makes new credentials, good for a day, for an API server at
// url, which has this address besides 127.0.0.1 if it is valid.
func writeCredentials(directory, url string, address netip.Addr) (credentials, error) {
	c := credentials{
		certificate:       filepath.Join(directory, "apiserver.crt"),
		key:               filepath.Join(directory, "apiserver.key"),
		serviceAccountKey: filepath.Join(directory, "serviceaccounts.key"),
		tokens:            filepath.Join(directory, "tokens.csv"),
		kubeconfig:        filepath.Join(directory, "kubeconfig"),
		token:             rand.Text(),
	}
	if err := c.write(url, address); err != nil {
		return credentials{}, fmt.Errorf("credentials: %w", err)
	}

	return c, nil
}

// write writes the files, and sets the authority.
func (c *credentials) write(url string, address netip.Addr) error {
	key, err := writeKey(c.key)
	if err != nil {
		return err
	}
	if c.authority, err = certify(key, address); err != nil {
		return err
	}
	if _, err := writeKey(c.serviceAccountKey); err != nil {
		return err
	}
	if err := os.WriteFile(c.certificate, c.authority, 0o600); err != nil {
		return err
	}
	if err := os.WriteFile(c.tokens, []byte(c.token+`,admin,admin,"system:masters"`+"\n"), 0o600); err != nil {
		return err
	}

	config := api.NewConfig()
	config.Clusters["test"] = &api.Cluster{Server: url, CertificateAuthorityData: c.authority}
	config.AuthInfos["admin"] = &api.AuthInfo{Token: c.token}
	config.Contexts["test"] = &api.Context{Cluster: "test", AuthInfo: "admin"}
	config.CurrentContext = "test"

	return clientcmd.WriteToFile(*config, c.kubeconfig)
}

// certify returns the PEM form of a certificate for key, signed by itself, for
// all the names of the API server for clients: its address, and those
// of the Service default/kubernetes.
func certify(key *ecdsa.PrivateKey, address netip.Addr) ([]byte, error) {
	now := time.Now()
	template := x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{CommonName: "kube-apiserver"},
		NotBefore:             now.Add(-time.Hour),
		NotAfter:              now.Add(24 * time.Hour),
		KeyUsage:              x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		IsCA:                  true,
		BasicConstraintsValid: true,
		DNSNames:              []string{"localhost", "kubernetes.default.svc"},
		IPAddresses:           []net.IP{net.IPv4(127, 0, 0, 1), net.IPv4(10, 96, 0, 1), net.IPv6loopback},
	}
	if address.IsValid() {
		template.IPAddresses = append(template.IPAddresses, address.AsSlice())
	}
	der, err := x509.CreateCertificate(rand.Reader, &template, &template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("certificate of the API server: %w", err)
	}

	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), nil
}

func writeKey(path string) (*ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}

	return key, os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), 0o600)
}
