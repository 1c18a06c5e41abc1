/* SPDX-License-Identifier: Apache-2.0 */
/* A TCP load generator and its server, as cheap as possible, so that the network path dominates.
 *
 *   load serve ADDRESS PORT [WORKERS]           serves until killed
 *   load short ADDRESS PORT SECONDS [COUNT]     connections of one byte each way
 *   load requests ADDRESS PORT SECONDS          one byte each way, repeatedly on one connection
 *   load upload ADDRESS PORT SECONDS            bulk on one connection, until the server has it
 *   load download ADDRESS PORT SECONDS          bulk on one connection, as read by the client
 *   load seen ADDRESS PORT                      the server's connections by client address
 *
 * The first byte of a connection selects its kind (enum kind). Clients print "DONE FAILED SECONDS",
 * where DONE counts connections, requests or bytes.
 *
 * A short connection is closed in order, the client first, and both ends wait for that: each one
 * takes the same packets, all within the measured time. TIME_WAIT would exhaust the client's ports,
 * so net.ipv4.tcp_max_tw_buckets is 0 in its network namespace (nodeport.py, connect.py). */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define PEERS 64
#define BULK (256 << 10)

enum kind { SHORT = 's', REQUESTS = 'r', UPLOAD = 'u', DOWNLOAD = 'd', SEEN = 'q' };

/* Connections by client address, shared by all workers; free slots have address 0. */
static struct peer {
	in_addr_t address;
	long count;
} *peers;
static char bulk[BULK];

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

/* ---- server -------------------------------------------------------------------------------- */

static void count_peer(in_addr_t address)
{
	for (int i = 0; i < PEERS; i++) {
		in_addr_t none = 0;

		if (peers[i].address == address ||
		    __atomic_compare_exchange_n(&peers[i].address, &none, address, 0,
						__ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST) ||
		    none == address) {
			__atomic_add_fetch(&peers[i].count, 1, __ATOMIC_RELAXED);
			return;
		}
	}
}

static void tell_peers(int s)
{
	for (int i = 0; i < PEERS && peers[i].address; i++) {
		struct in_addr address = {peers[i].address};

		dprintf(s, "%s %ld\n", inet_ntoa(address), peers[i].count);
	}
}

static void answer_requests(int s)
{
	char byte;

	while (write(s, "y", 1) == 1 && read(s, &byte, 1) == 1)
		;
}

static void swallow(int s)
{
	while (recv(s, bulk, sizeof bulk, MSG_TRUNC) > 0)
		;
	write(s, "y", 1);
}

/* Sends until the client has closed its side. The connection must not end with a reset, which a
 * load balancer cannot trust to be the end of the connection. */
static void pour(int s)
{
	char byte;

	while (recv(s, &byte, 1, MSG_DONTWAIT) != 0 && write(s, bulk, sizeof bulk) > 0)
		;
}

/* Serves one connection. Long ones get a child process, so that the accept loop continues. */
static void serve_one(int s, in_addr_t from)
{
	char kind, end;

	if (read(s, &kind, 1) != 1)
		return;
	if (kind == SEEN) {
		tell_peers(s);
		return;
	}
	count_peer(from);
	if (kind == SHORT) {
		if (write(s, &kind, 1) == 1)
			read(s, &end, 1);
		return;
	}
	if (fork() == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (kind == REQUESTS)
			answer_requests(s);
		else if (kind == UPLOAD)
			swallow(s);
		else if (kind == DOWNLOAD)
			pour(s);
		_exit(0);
	}
}

static int serve(struct sockaddr_in *at, int workers)
{
	int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0);

	peers = mmap(NULL, PEERS * sizeof *peers, PROT_READ | PROT_WRITE,
		     MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
	setsockopt(listener, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
	if (peers == MAP_FAILED || bind(listener, (struct sockaddr *)at, sizeof *at) ||
	    listen(listener, 4096)) {
		perror("serve");
		return 1;
	}
	signal(SIGCHLD, SIG_IGN);
	while (--workers > 0 && fork() > 0)
		;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	for (;;) {
		struct sockaddr_in from;
		socklen_t size = sizeof from;
		int s = accept(listener, (struct sockaddr *)&from, &size);

		if (s < 0)
			continue;
		serve_one(s, from.sin_addr.s_addr);
		close(s);
	}
}

/* ---- client -------------------------------------------------------------------------------- */

/* Connects and sends the kind; returns the socket, or -1. */
static int begin(const struct sockaddr_in *to, char kind)
{
	int one = 1, s = socket(AF_INET, SOCK_STREAM, 0);

	setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
	if (connect(s, (const struct sockaddr *)to, sizeof *to) || write(s, &kind, 1) != 1) {
		close(s);
		return -1;
	}
	return s;
}

static int one_short(const struct sockaddr_in *to)
{
	char byte;
	int s = begin(to, SHORT), good;

	if (s < 0)
		return 0;
	good = read(s, &byte, 1) == 1 && !shutdown(s, SHUT_WR) && read(s, &byte, 1) == 0;
	close(s);
	return good;
}

static int shorts(const struct sockaddr_in *to, double seconds, long most)
{
	long done = 0, failed = 0;
	double start = now();

	while (now() < start + seconds && (!most || done + failed < most)) {
		if (one_short(to))
			done++;
		else
			failed++;
	}
	return printf("%ld %ld %f\n", done, failed, now() - start) < 0;
}

static int requests(const struct sockaddr_in *to, double seconds)
{
	int s = begin(to, REQUESTS);
	double start = now();
	char byte;
	long done = 0;

	if (s < 0 || read(s, &byte, 1) != 1)
		return 1;
	while (now() < start + seconds) {
		if (write(s, "x", 1) != 1 || read(s, &byte, 1) != 1)
			return 1;
		done++;
	}
	return printf("%ld 0 %f\n", done, now() - start) < 0;
}

static int upload(const struct sockaddr_in *to, double seconds)
{
	int s = begin(to, UPLOAD);
	double start = now();
	char byte;
	long done = 0;

	while (s >= 0 && now() < start + seconds) {
		ssize_t sent = write(s, bulk, sizeof bulk);

		if (sent <= 0)
			return 1;
		done += sent;
	}
	if (s < 0 || shutdown(s, SHUT_WR) || read(s, &byte, 1) != 1)
		return 1;
	return printf("%ld 0 %f\n", done, now() - start) < 0;
}

static int download(const struct sockaddr_in *to, double seconds)
{
	int s = begin(to, DOWNLOAD);
	double start = now(), took;
	long done = 0;

	while (s >= 0 && now() < start + seconds) {
		ssize_t got = recv(s, bulk, sizeof bulk, MSG_TRUNC);

		if (got <= 0)
			return 1;
		done += got;
	}
	took = now() - start;
	if (s < 0 || shutdown(s, SHUT_WR))
		return 1;
	while (recv(s, bulk, sizeof bulk, MSG_TRUNC) > 0)
		;
	return printf("%ld 0 %f\n", done, took) < 0;
}

static int seen(const struct sockaddr_in *to)
{
	int s = begin(to, SEEN);
	ssize_t got;

	while (s >= 0 && (got = read(s, bulk, sizeof bulk)) > 0)
		fwrite(bulk, 1, got, stdout);
	return s < 0;
}

int main(int argc, char **argv)
{
	struct sockaddr_in at = {.sin_family = AF_INET};
	const char *what = argc > 3 ? argv[1] : "";
	double seconds = argc > 4 ? atof(argv[4]) : 1;

	signal(SIGPIPE, SIG_IGN);
	if (argc < 4 || inet_pton(AF_INET, argv[2], &at.sin_addr) != 1)
		return 2;
	at.sin_port = htons(atoi(argv[3]));
	if (!strcmp(what, "serve"))
		return serve(&at, argc > 4 ? atoi(argv[4]) : 1);
	if (!strcmp(what, "short"))
		return shorts(&at, seconds, argc > 5 ? atol(argv[5]) : 0);
	if (!strcmp(what, "requests"))
		return requests(&at, seconds);
	if (!strcmp(what, "upload"))
		return upload(&at, seconds);
	if (!strcmp(what, "download"))
		return download(&at, seconds);
	return strcmp(what, "seen") ? 2 : seen(&at);
}
