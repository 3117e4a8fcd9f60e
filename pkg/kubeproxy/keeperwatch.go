package kubeproxy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/google/nftables"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// keeperInterval is how often [WatchKeeper] looks, beside when the kernel reports a change.
const keeperInterval = 30 * time.Second

// WatchKeeper puts the table back when another program takes it, as `nft flush ruleset` does, as long as connections
// need it, and logs that. It returns when ctx ends, and at once where the kernel has no nftables.
func WatchKeeper(ctx context.Context, log *slog.Logger) error {
	return watchKeeper(ctx, log, keeperInterval)
}

func watchKeeper(ctx context.Context, log *slog.Logger, interval time.Duration) error {
	conn, err := nftables.New()
	if err != nil {
		return fmt.Errorf("nftables: %w", err)
	}
	changes, err := subscribeToTables()
	if lacksNFTables(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("subscribe to changes of nftables: %w", err)
	}
	defer changes.Close()
	stop := context.AfterFunc(ctx, func() { changes.Close() })
	defer stop()

	for there := false; ctx.Err() == nil; {
		if there, err = putKeeperBack(conn, there, log); err != nil {
			log.Error("connections of kube-proxy's rules may end", "error", err)
		}
		if err := awaitTables(changes, interval); err != nil && ctx.Err() == nil {
			return fmt.Errorf("changes of nftables: %w", err)
		}
	}

	return nil
}

// subscribeToTables returns a socket that receives the changes of nftables.
func subscribeToTables() (*netlink.Conn, error) {
	changes, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return nil, err
	}
	if err := changes.JoinGroup(unix.NFNLGRP_NFTABLES); err != nil {
		return nil, errors.Join(err, changes.Close())
	}

	return changes, nil
}

// awaitTables returns when a table has come or gone, or may have, and at least after the interval.
func awaitTables(changes *netlink.Conn, interval time.Duration) error {
	if err := changes.SetReadDeadline(time.Now().Add(interval)); err != nil {
		return err
	}
	for {
		messages, err := changes.Receive()
		if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, unix.ENOBUFS) {
			return nil // messages are lost by the latter
		}
		if err != nil {
			return err
		}
		for _, m := range messages {
			if kind := m.Header.Type & 0xff; kind == unix.NFT_MSG_NEWTABLE || kind == unix.NFT_MSG_DELTABLE {
				return nil
			}
		}
	}
}

// putKeeperBack adds the table if it was there, is not, and is needed. It reports whether it is there now.
func putKeeperBack(conn *nftables.Conn, was bool, log *slog.Logger) (is bool, err error) {
	table, err := findKeeper(conn)
	if err != nil || table != nil || !was {
		return table != nil || was && err != nil, err
	}
	open, needed, err := needKeeper()
	if err != nil || !needed {
		return err != nil, err
	}
	if err := addKeeper(conn); err != nil {
		return true, err
	}
	log.Warn("another program has removed the table of nftables that keeps connections of kube-proxy's rules alive; "+
		"it is put back", "table", "inet "+KeeperTable, "connections", open)

	return true, nil
}
